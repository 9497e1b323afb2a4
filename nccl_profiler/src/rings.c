/* The rings: one a thread, made before NCCL's first event, lent to threads and taken back when they are gone. */
#include "core.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

HIDDEN struct state prism;
HIDDEN __thread struct tls prism_tls __attribute__((tls_model("initial-exec")));

bool rings_create(uint64_t records_each) {
  size_t bytes = records_each * sizeof(union record);
  unsigned num = MAX_RINGS;
  void *memory = MAP_FAILED;
  while (num >= 8) { /* address space may be limited; memory is taken only for what is touched */
    memory = mmap(NULL, bytes * num, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) break;
    num /= 2;
  }
  if (memory == MAP_FAILED) return false;
  for (unsigned i = 0; i < num; i++) {
    struct ring *ring = &prism.rings[i];
    ring->slots = (union record *)((char *)memory + bytes * i);
    ring->mask = records_each - 1;
    ring->index = i;
  }
  prism.num_rings = num;
  return true;
}

/* In a forked child: the rings hold the parent's events and belong to the parent's threads. */
void rings_reset(void) {
  for (unsigned i = 0; i < prism.num_rings; i++) {
    struct ring *ring = &prism.rings[i];
    atomic_store(&ring->head, 0);
    atomic_store(&ring->tail, 0);
    ring->next = ring->tail_seen = 0;
    atomic_store(&ring->lost_starts, 0);
    atomic_store(&ring->lost_stops, 0);
    atomic_store(&ring->lost_states, 0);
    atomic_store(&ring->sampled_out, 0);
    atomic_store(&ring->orphans, 0);
    memset(&ring->written, 0, sizeof ring->written);
    atomic_store(&ring->owner, 0);
  }
  atomic_store(&prism.no_ring, 0);
}

/* Gives the calling thread a ring of its own; NULL when there is none left. */
struct ring *ring_claim(void) {
  int me = (int)syscall(SYS_gettid);
  for (unsigned i = 0; i < prism.num_rings; i++) {
    struct ring *ring = &prism.rings[i];
    int nobody = 0;
    if (atomic_load_explicit(&ring->owner, memory_order_relaxed) != 0) continue;
    if (!atomic_compare_exchange_strong_explicit(&ring->owner, &nobody, me, memory_order_acquire,
                                                 memory_order_relaxed))
      continue;
    prism_tls.ring = ring;
    prism_tls.generation = atomic_load_explicit(&prism.generation, memory_order_relaxed);
    return ring;
  }
  atomic_fetch_add_explicit(&prism.no_ring, 1, memory_order_relaxed);
  return NULL;
}

/* Touches the memory of a few free rings, so that page faults are the writer's and not NCCL's. */
void rings_warm(unsigned num_spare) {
  for (unsigned i = 0; i < prism.num_rings && num_spare > 0; i++) {
    struct ring *ring = &prism.rings[i];
    if (atomic_load_explicit(&ring->owner, memory_order_relaxed) != 0) continue;
    num_spare--;
    if (ring->is_warm) continue;
    ring->is_warm = true;
    madvise(ring->slots, (ring->mask + 1) * sizeof(union record), 23 /* MADV_POPULATE_WRITE, Linux 5.14 */);
  }
}

/* Frees the rings of threads that have ended; for whoever drains. */
void rings_reclaim(void) {
  for (unsigned i = 0; i < prism.num_rings; i++) {
    struct ring *ring = &prism.rings[i];
    int owner = atomic_load_explicit(&ring->owner, memory_order_acquire);
    if (owner == 0 || syscall(SYS_tgkill, prism.pid, owner, 0) == 0 || errno != ESRCH) continue;
    if (atomic_load_explicit(&ring->head, memory_order_acquire) !=
        atomic_load_explicit(&ring->tail, memory_order_relaxed))
      continue; /* its last records come first */
    atomic_store_explicit(&ring->owner, 0, memory_order_release);
  }
}
