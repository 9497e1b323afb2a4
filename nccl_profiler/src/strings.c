/* The names that NCCL repeats with every event (functions, element types, algorithms) as codes of one byte.
 *
 * A table that only grows and that any thread may add to without a lock. Two threads that meet the same new text at
 * once may give it two codes; both mean the same.
 */
#include "core.h"

enum { READY = 1 };

static _Atomic int slot_state[MAX_STRINGS];
static char texts[MAX_STRINGS][MAX_TEXT];
static _Atomic unsigned num_used = 1; /* code 0 is no text */

const char *string_text(unsigned code) { return texts[code]; }

unsigned strings_count(void) {
  unsigned num = atomic_load_explicit(&num_used, memory_order_acquire);
  return num < MAX_STRINGS ? num : MAX_STRINGS;
}

bool string_is_ready(unsigned code) {
  return atomic_load_explicit(&slot_state[code], memory_order_acquire) == READY;
}

uint8_t string_code_slow(struct ring *ring, const char *text) {
  char cut[MAX_TEXT];
  size_t length = strnlen(text, MAX_TEXT - 1);
  memcpy(cut, text, length);
  cut[length] = 0;
  unsigned code = 0, num = strings_count();
  for (unsigned i = 1; i < num && code == 0; i++)
    if (string_is_ready(i) && strcmp(texts[i], cut) == 0) code = i;
  if (code == 0) {
    unsigned fresh = atomic_load_explicit(&num_used, memory_order_relaxed);
    do {
      if (fresh >= MAX_STRINGS) return 0;
    } while (!atomic_compare_exchange_weak_explicit(&num_used, &fresh, fresh + 1, memory_order_acq_rel,
                                                    memory_order_relaxed));
    memcpy(texts[fresh], cut, length + 1);
    atomic_store_explicit(&slot_state[fresh], READY, memory_order_release);
    code = fresh;
  }
  uintptr_t bits = (uintptr_t)text;
  unsigned slot = (unsigned)((bits >> 3) ^ (bits >> 9)) % CACHE_SLOTS;
  if (length < MAX_TEXT - 1) { /* a cut text would never compare equal */
    ring->cache[slot].text = text;
    ring->cache[slot].code = (uint8_t)code;
  }
  return (uint8_t)code;
}
