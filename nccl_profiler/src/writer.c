/* The one thread that takes records out of the rings and puts them into the file.
 *
 * Draining is also done at the end of a communicator, at exit and in a crash handler, by whoever is there: a try-lock
 * makes it one at a time. Everything here may be called from a signal handler: no allocation, no stdio, no mutex.
 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CLOCK_EVERY_NS = 1000000000, SPARE_RINGS = 4, MAX_SAME_NAME = 1000 };

static int file = -1;
static int64_t file_bytes;
static bool broken; /* a write failed: nothing more is written, what there is stays readable */
static uint64_t lost_bytes;
static char path[1100];
static char problem[1300];
static atomic_flag draining = ATOMIC_FLAG_INIT;
static int64_t interval_ns;
static int64_t last_clock_ns, last_reclaim_ns;
static bool string_written[MAX_STRINGS];

static void pause_ns(int64_t ns) {
  struct timespec time = {ns / 1000000000, ns % 1000000000};
  nanosleep(&time, NULL);
}

/* The sum of the 64-bit words, each times an odd number that rises: one changed word, or two exchanged, show. */
static uint64_t checksum(uint64_t sum, uint64_t *place, const void *data, size_t bytes) {
  const unsigned char *at = data;
  for (size_t i = 0; i < bytes; i += 8) {
    uint64_t word;
    memcpy(&word, at + i, 8);
    sum += word * (2 * (*place)++ + 1);
  }
  return sum;
}

static void put(struct iovec *parts, int num_parts) {
  size_t total = 0;
  for (int i = 0; i < num_parts; i++) total += parts[i].iov_len;
  if (broken || file < 0) {
    lost_bytes += total;
    return;
  }
  size_t left = total;
  while (left > 0) {
    ssize_t done = writev(file, parts, num_parts);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) { /* the disk is full or the file is gone: cut back to the last whole block and give up */
      broken = true;
      lost_bytes += total;
      if (ftruncate(file, file_bytes) != 0) return;
      return;
    }
    left -= (size_t)done;
    for (int i = 0; i < num_parts && done > 0; i++) {
      size_t step = (size_t)done < parts[i].iov_len ? (size_t)done : parts[i].iov_len;
      parts[i].iov_base = (char *)parts[i].iov_base + step;
      parts[i].iov_len -= step;
      done -= (ssize_t)step;
    }
  }
  file_bytes += (int64_t)total;
}

static void put_block(int kind, unsigned ring, int thread_id, const void *one, size_t one_bytes, const void *two,
                      size_t two_bytes) {
  struct block_header header = {BLOCK_MARKER, (uint16_t)kind, (uint16_t)ring, (uint32_t)(one_bytes + two_bytes),
                                thread_id, 0, 0};
  uint64_t place = 0;
  header.checksum = checksum(checksum(0, &place, one, one_bytes), &place, two, two_bytes);
  place = 0;
  header.header_checksum = checksum(0, &place, &header, 24);
  struct iovec parts[3] = {{&header, sizeof header}, {(void *)one, one_bytes}, {(void *)two, two_bytes}};
  put(parts, 3);
}

static void write_strings(void) {
  unsigned num = strings_count();
  for (unsigned code = 1; code < num; code++) {
    if (string_written[code] || !string_is_ready(code)) continue;
    struct string_entry entry = {.code = code, .length = (uint32_t)strlen(string_text(code))};
    memcpy(entry.text, string_text(code), entry.length);
    put_block(BLOCK_STRINGS, 0, 0, &entry, sizeof entry, NULL, 0);
    string_written[code] = true;
  }
}

static void write_comms(void) {
  for (struct comm *comm = atomic_load_explicit(&prism.comms, memory_order_acquire); comm; comm = comm->next) {
    uint32_t version = atomic_load_explicit(&comm->version, memory_order_acquire);
    if (version == comm->written_version) continue;
    struct comm_entry entry = comm->entry;
    entry.hash = atomic_load_explicit(&comm->hash, memory_order_relaxed);
    entry.rank = atomic_load_explicit(&comm->rank, memory_order_relaxed);
    entry.destroyed_ns = atomic_load_explicit(&comm->destroyed_ns, memory_order_relaxed);
    if (atomic_load_explicit(&comm->name_state, memory_order_acquire) == 2) {
      memcpy(entry.name, comm->name, sizeof entry.name);
      entry.name_bytes = (int32_t)strlen(entry.name);
    }
    put_block(BLOCK_COMMS, 0, 0, &entry, sizeof entry, NULL, 0);
    comm->written_version = version;
  }
}

static bool write_ring(struct ring *ring, uint64_t head) {
  uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
  uint64_t num = head - tail, size = ring->mask + 1;
  if (num == 0) return false;
  uint64_t begin = tail & ring->mask, first = num < size - begin ? num : size - begin;
  put_block(BLOCK_RECORDS, ring->index, atomic_load_explicit(&ring->owner, memory_order_relaxed), &ring->slots[begin],
            first * sizeof(union record), ring->slots, (num - first) * sizeof(union record));
  atomic_store_explicit(&ring->tail, head, memory_order_release);
  return num > size / 8;
}

static void write_counters(struct ring *ring) {
  struct counter_entry now = {
      .ring = (uint16_t)ring->index,
      .num_records = atomic_load_explicit(&ring->tail, memory_order_relaxed),
      .lost_starts = atomic_load_explicit(&ring->lost_starts, memory_order_relaxed),
      .lost_stops = atomic_load_explicit(&ring->lost_stops, memory_order_relaxed),
      .lost_states = atomic_load_explicit(&ring->lost_states, memory_order_relaxed),
      .no_ring = atomic_load_explicit(&prism.no_ring, memory_order_relaxed),
      .sampled_out = atomic_load_explicit(&ring->sampled_out, memory_order_relaxed),
      .orphans = atomic_load_explicit(&ring->orphans, memory_order_relaxed),
  };
  if (memcmp(&now, &ring->written, sizeof now) == 0) return;
  ring->written = now;
  put_block(BLOCK_COUNTERS, ring->index, 0, &now, sizeof now, NULL, 0);
}

static void write_clock(int64_t now) {
  struct timespec real;
  struct clock_entry entry = {.monotonic_ns = now_ns()};
  clock_gettime(CLOCK_REALTIME, &real);
  entry.realtime_ns = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec;
  entry.monotonic_ns += (now_ns() - entry.monotonic_ns) / 2;
  put_block(BLOCK_CLOCK, 0, 0, &entry, sizeof entry, NULL, 0);
  last_clock_ns = now;
}

/* Whether a ring was so full that the next round should follow at once. */
static bool drain_once(void) {
  uint64_t heads[MAX_RINGS];
  bool is_busy = false;
  for (unsigned i = 0; i < prism.num_rings; i++)
    heads[i] = atomic_load_explicit(&prism.rings[i].head, memory_order_acquire);
  write_strings(); /* first: the texts and communicators of these records are there by now */
  write_comms();
  for (unsigned i = 0; i < prism.num_rings; i++) is_busy |= write_ring(&prism.rings[i], heads[i]);
  return is_busy;
}

bool writer_drain(int64_t patience_ns, int end_reason) {
  int64_t deadline = now_ns() + patience_ns;
  while (atomic_flag_test_and_set_explicit(&draining, memory_order_acquire)) {
    if (now_ns() > deadline) return false;
    pause_ns(100000);
  }
  drain_once();
  int64_t now = now_ns();
  bool is_second = now - last_clock_ns >= CLOCK_EVERY_NS;
  if (is_second || end_reason) {
    write_clock(now);
    for (unsigned i = 0; i < prism.num_rings; i++) write_counters(&prism.rings[i]);
  }
  if (end_reason) {
    struct end_entry entry = {.monotonic_ns = now, .reason = (uint32_t)end_reason, .lost_bytes = lost_bytes};
    put_block(BLOCK_END, 0, 0, &entry, sizeof entry, NULL, 0);
  }
  atomic_flag_clear_explicit(&draining, memory_order_release);
  return !broken;
}

static void *write_until_exit(void *nothing) {
  (void)nothing;
  pthread_setname_np(pthread_self(), "prism-nccl");
  for (;;) {
    bool is_busy = false;
    if (!atomic_flag_test_and_set_explicit(&draining, memory_order_acquire)) {
      is_busy = drain_once();
      int64_t now = now_ns();
      rings_warm(SPARE_RINGS);
      if (now - last_reclaim_ns >= CLOCK_EVERY_NS / 4) {
        rings_reclaim();
        last_reclaim_ns = now;
      }
      if (now - last_clock_ns >= CLOCK_EVERY_NS) {
        write_clock(now);
        for (unsigned i = 0; i < prism.num_rings; i++) write_counters(&prism.rings[i]);
      }
      atomic_flag_clear_explicit(&draining, memory_order_release);
    }
    if (!is_busy) pause_ns(interval_ns);
  }
  return NULL;
}

static void fill_header(struct file_header *header, const struct settings *settings) {
  struct timespec real;
  memset(header, 0, sizeof *header);
  memcpy(header->magic, FILE_MAGIC, sizeof header->magic);
  header->version = FILE_VERSION;
  header->header_bytes = sizeof *header;
  header->record_bytes = sizeof(union record);
  header->pid = prism.pid;
  header->rank = settings->rank;
  header->local_rank = settings->local_rank;
  header->world_size = settings->world_size;
  header->event_mask = settings->event_mask;
  header->sample_every = settings->sample_every;
  header->monotonic_ns = now_ns();
  clock_gettime(CLOCK_REALTIME, &real);
  header->realtime_ns = (int64_t)real.tv_sec * 1000000000 + real.tv_nsec;
  gethostname(header->host, sizeof header->host - 1);
  int source = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (source >= 0) {
    ssize_t num = read(source, header->boot_id, 36);
    if (num < 36) memset(header->boot_id, 0, sizeof header->boot_id);
    close(source);
  }
}

const char *writer_open(const struct settings *settings) {
  snprintf(path, sizeof path, "%s", settings->path);
  for (int number = 1;; number++) { /* never over another file: a restarted rank may have the name of its former self */
    file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file >= 0 || errno != EEXIST || number == MAX_SAME_NAME) break;
    snprintf(path, sizeof path, "%s.%d", settings->path, number);
  }
  if (file < 0) {
    snprintf(problem, sizeof problem, "cannot create %s: %s", path, strerror(errno));
    return problem;
  }
  struct file_header header;
  fill_header(&header, settings);
  struct iovec parts[1] = {{&header, sizeof header}};
  put(parts, 1);
  if (broken) {
    snprintf(problem, sizeof problem, "cannot write %s", path);
    return problem;
  }
  last_clock_ns = last_reclaim_ns = now_ns();
  return NULL;
}

bool writer_start(const struct settings *settings) {
  interval_ns = settings->interval_ns;
  rings_warm(SPARE_RINGS);
  sigset_t all, before; /* no signal of the program may end up in our thread */
  pthread_t thread;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&thread, NULL, write_until_exit, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) return false;
  pthread_detach(thread);
  return true;
}

/* In a forked child: the file is the parent's. */
void writer_forget(void) {
  if (file >= 0) close(file);
  file = -1;
  file_bytes = 0;
  broken = false;
  lost_bytes = 0;
  memset(string_written, 0, sizeof string_written);
  atomic_flag_clear(&draining);
  atomic_store(&prism.comms, NULL);
}

const char *writer_path(void) { return file >= 0 ? path : NULL; }
