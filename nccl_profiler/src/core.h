/* What the interface shims and the writer share: rings, communicators, and the few inline functions of the hot path.
 *
 * A callback of NCCL does this and nothing else: find the ring of its thread, read the clock, store records of 32
 * bytes, publish them with one release store. It takes no lock, calls no allocator, makes no system call (but for one
 * gettid when a thread meets the library for the first time), and when its ring is full it counts and returns.
 */
#ifndef PRISM_NCCL_CORE_H
#define PRISM_NCCL_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "abi.h"
#include "records.h"

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define HIDDEN __attribute__((visibility("hidden")))

enum { MAX_RINGS = 128, MAX_STRINGS = 256, CACHE_SLOTS = 64 };

/* An event's id is also the handle that NCCL keeps: type in bits 0-3, ring in 4-11, ordinal in the ring above. It is
 * never a pointer, so a handle that outlives its communicator can do no harm. 0 is no event. */
#define ID_TYPE(id) ((unsigned)((id) & 15))

struct ring {
  _Alignas(64) _Atomic uint64_t head;   /* records published; written by the owner only */
  uint64_t next, tail_seen, num_events; /* the owner's own */
  uint64_t ended;                       /* the event whose end the last record told with its state */
  _Atomic uint64_t lost_starts, lost_stops, lost_states, sampled_out, orphans;
  struct { const char *text; uint8_t code; } cache[CACHE_SLOTS];
  _Alignas(64) _Atomic uint64_t tail; /* records written out; written by whoever drains */
  _Atomic int owner;                  /* thread id; 0: free */
  union record *slots;
  uint64_t mask;
  unsigned index;
  bool is_warm;
  struct counter_entry written; /* the counters as last written out; of whoever drains */
};

struct comm {
  struct comm *next;
  struct comm_entry entry; /* fixed when the communicator is created, but for what follows */
  _Atomic uint64_t hash;
  _Atomic int rank;
  _Atomic int64_t destroyed_ns;
  _Atomic uint32_t num_messages;  /* for sampling */
  _Atomic int name_state;         /* 0 none, 1 being written, 2 there */
  char name[MAX_COMM_NAME];       /* not in the entry: it may come while the entry is being copied */
  _Atomic uint32_t version;       /* rises with every change */
  uint32_t written_version;       /* of whoever drains */
};

struct settings {
  char path[1024];
  uint32_t event_mask, sample_every;
  uint64_t ring_records;
  int64_t interval_ns;
  bool catch_signals;
  int rank, local_rank, world_size;
};

struct state {
  _Atomic bool active;        /* callbacks record; read on every call */
  _Atomic uint32_t generation; /* rises in a forked child: rings of the parent are not the child's */
  uint32_t event_mask, sample_every;
  int pid;
  struct ring rings[MAX_RINGS];
  unsigned num_rings;
  _Atomic uint64_t no_ring; /* events lost because every ring had an owner */
  _Atomic(struct comm *) comms;
  _Atomic uint32_t num_comms;
};

extern HIDDEN struct state prism;

struct tls { struct ring *ring; uint32_t generation; };
/* initial-exec: the first access of a thread must not allocate */
extern HIDDEN __thread struct tls prism_tls __attribute__((tls_model("initial-exec")));

/* rings.c */
HIDDEN bool rings_create(uint64_t records_each);
HIDDEN struct ring *ring_claim(void);
HIDDEN void rings_warm(unsigned num_spare);
HIDDEN void rings_reclaim(void);
HIDDEN void rings_reset(void);

/* strings.c: text -> code, for texts that NCCL repeats; 0 for none, or for one too many */
HIDDEN uint8_t string_code_slow(struct ring *ring, const char *text);
HIDDEN const char *string_text(unsigned code);
HIDDEN unsigned strings_count(void);
HIDDEN bool string_is_ready(unsigned code);

/* writer.c */
HIDDEN const char *writer_open(const struct settings *settings); /* NULL, or what went wrong */
HIDDEN bool writer_start(const struct settings *settings);
HIDDEN bool writer_drain(int64_t patience_ns, int end_reason); /* end_reason 0: the file goes on */
HIDDEN void writer_forget(void);
HIDDEN const char *writer_path(void);

/* life.c */
HIDDEN void settings_read(struct settings *settings);
HIDDEN struct comm *comm_create(int version, const char *name, uint64_t hash, int num_nodes, int num_ranks, int rank,
                                abi_logger logger);
HIDDEN void comm_learn(struct comm *comm, uint64_t hash, int rank, const char *name);
HIDDEN void comm_destroy(struct comm *comm);
HIDDEN void signals_install(void);

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void count(_Atomic uint64_t *counter) { /* only the owner of the ring counts: no locked instruction */
  atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + 1, memory_order_relaxed);
}

static inline struct ring *my_ring(void) {
  struct tls *tls = &prism_tls;
  if (LIKELY(tls->ring != NULL &&
             tls->generation == atomic_load_explicit(&prism.generation, memory_order_relaxed)))
    return tls->ring;
  return ring_claim();
}

/* Whether `num` records fit; if so they may be stored with record_at and published. */
static inline bool ring_fits(struct ring *ring, unsigned num) {
  if (LIKELY(ring->next + num - ring->tail_seen <= ring->mask + 1)) return true;
  ring->tail_seen = atomic_load_explicit(&ring->tail, memory_order_acquire);
  return ring->next + num - ring->tail_seen <= ring->mask + 1;
}

static inline union record *record_at(struct ring *ring, unsigned place) {
  return &ring->slots[(ring->next + place) & ring->mask];
}

static inline void ring_publish(struct ring *ring, unsigned num) {
  ring->next += num;
  atomic_store_explicit(&ring->head, ring->next, memory_order_release);
}

static inline uint8_t string_code(struct ring *ring, const char *text) {
  if (text == NULL) return 0;
  uintptr_t bits = (uintptr_t)text;
  unsigned slot = (unsigned)((bits >> 3) ^ (bits >> 9)) % CACHE_SLOTS;
  /* the pointer alone proves nothing: the memory may hold another text by now */
  if (LIKELY(ring->cache[slot].text == text && strcmp(string_text(ring->cache[slot].code), text) == 0))
    return ring->cache[slot].code;
  return string_code_slow(ring, text);
}

#endif
