/* The life of the library in a process: settings, communicators, fork, exit and crash.
 *
 * Nothing here runs in a callback of NCCL but init and finalize. No error leaves it for NCCL: what cannot be done is
 * said once, and then nothing is recorded.
 */
#include "core.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FLUSH_PATIENCE_NS = 1000000000, EXIT_PATIENCE_NS = 2000000000, CRASH_PATIENCE_NS = 200000000 };
enum { MAX_COMMS = 65534 };

static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static bool has_rings, has_failed, is_started, has_fork_handler;

static void say(abi_logger logger, const char *text) {
  if (logger) logger(ABI_LOG_WARN, ABI_LOG_PROFILE, __FILE__, __LINE__, "PROFILER/prism: %s", text);
  fprintf(stderr, "prism-nccl: %s\n", text);
}

static void in_forked_child(void) {
  atomic_store(&prism.active, false);
  atomic_fetch_add(&prism.generation, 1);
  rings_reset();
  writer_forget();
  is_started = has_failed = false;
  pthread_mutex_init(&starting, NULL);
}

static void start(abi_logger logger) {
  struct settings settings;
  settings_read(&settings);
  prism.pid = (int)getpid();
  prism.event_mask = settings.event_mask;
  prism.sample_every = settings.sample_every;
  if (!has_rings && !(has_rings = rings_create(settings.ring_records))) {
    say(logger, "no memory for the rings (PRISM_NCCL_RING_KIB makes them smaller): nothing is recorded");
    return;
  }
  const char *problem = writer_open(&settings);
  if (problem) {
    char text[1400];
    snprintf(text, sizeof text, "%s (PRISM_NCCL_OUTPUT names the file): nothing is recorded", problem);
    say(logger, text);
    return;
  }
  if (!writer_start(&settings)) {
    say(logger, "no thread can be started: nothing is recorded");
    return;
  }
  if (!has_fork_handler) pthread_atfork(NULL, NULL, in_forked_child);
  has_fork_handler = true;
  if (settings.catch_signals) signals_install();
  is_started = true;
  atomic_store(&prism.active, true);
}

/* The CUDA device of the calling thread, if the driver is loaded: NCCL does not say which one it is. */
static void find_device(struct comm_entry *entry) {
  entry->device = -1;
  void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  if (!driver) return;
  int (*get_device)(int *);
  int (*get_uuid)(void *, int);
  *(void **)&get_device = dlsym(driver, "cuCtxGetDevice");
  *(void **)&get_uuid = dlsym(driver, "cuDeviceGetUuid_v2");
  if (!get_uuid) *(void **)&get_uuid = dlsym(driver, "cuDeviceGetUuid");
  int device;
  if (get_device && get_device(&device) == 0) {
    entry->device = device;
    if (!get_uuid || get_uuid(entry->device_uuid, device) != 0) memset(entry->device_uuid, 0, 16);
  }
  dlclose(driver);
}

static void set_name(struct comm *comm, const char *name) {
  int none = 0;
  if (name == NULL || *name == 0 || !atomic_compare_exchange_strong(&comm->name_state, &none, 1)) return;
  memcpy(comm->name, name, strnlen(name, MAX_COMM_NAME - 1));
  atomic_store_explicit(&comm->name_state, 2, memory_order_release);
}

/* NULL where nothing is to be recorded. */
struct comm *comm_create(int version, const char *name, uint64_t hash, int num_nodes, int num_ranks, int rank,
                         abi_logger logger) {
  pthread_mutex_lock(&starting);
  if (!is_started && !has_failed) {
    start(logger);
    has_failed = !is_started;
  }
  bool works = is_started;
  pthread_mutex_unlock(&starting);
  if (!works) return NULL;
  uint32_t number = atomic_fetch_add(&prism.num_comms, 1) + 1;
  struct comm *comm = number <= MAX_COMMS ? calloc(1, sizeof *comm) : NULL; /* kept: late callbacks may still name it */
  if (comm == NULL) {
    if (number == MAX_COMMS + 1) say(logger, "too many communicators: later ones are not recorded");
    return NULL;
  }
  comm->entry.number = number;
  comm->entry.num_ranks = num_ranks;
  comm->entry.num_nodes = num_nodes;
  comm->entry.created_ns = now_ns();
  comm->entry.interface_version = version;
  comm->entry.thread_id = (int32_t)syscall(SYS_gettid);
  find_device(&comm->entry);
  atomic_store(&comm->hash, hash);
  atomic_store(&comm->rank, rank);
  atomic_store(&comm->destroyed_ns, ABSENT_NS);
  set_name(comm, name);
  atomic_store(&comm->version, 1);
  struct comm *first = atomic_load(&prism.comms);
  do comm->next = first;
  while (!atomic_compare_exchange_weak(&prism.comms, &first, comm));
  return comm;
}

/* Up to version 3 a communicator is named by its events only. Called from callbacks: it must not block. */
void comm_learn(struct comm *comm, uint64_t hash, int rank, const char *name) {
  uint64_t nothing = 0;
  if (hash == 0 || !atomic_compare_exchange_strong(&comm->hash, &nothing, hash)) return;
  atomic_store(&comm->rank, rank);
  set_name(comm, name);
  atomic_fetch_add_explicit(&comm->version, 1, memory_order_release);
}

void comm_destroy(struct comm *comm) {
  atomic_store(&comm->destroyed_ns, now_ns());
  atomic_fetch_add_explicit(&comm->version, 1, memory_order_release);
  writer_drain(FLUSH_PATIENCE_NS, 0);
}

/* ---- exit and crash --------------------------------------------------------------------------------------------- */

__attribute__((destructor)) static void at_exit(void) {
  if (atomic_load(&prism.active) && prism.pid == (int)getpid()) writer_drain(EXIT_PATIENCE_NS, END_EXIT);
}

static const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
enum { NUM_CRASH_SIGNALS = sizeof crash_signals / sizeof crash_signals[0] };
static struct sigaction before[NUM_CRASH_SIGNALS];

static void on_crash(int number, siginfo_t *info, void *context) {
  (void)context;
  if (atomic_load(&prism.active)) writer_drain(CRASH_PATIENCE_NS, END_SIGNAL);
  for (int i = 0; i < NUM_CRASH_SIGNALS; i++)
    if (crash_signals[i] == number) sigaction(number, &before[i], NULL);
  /* a fault happens again when we return, and meets whoever handled it before us; what was sent is sent again */
  if (info == NULL || info->si_code <= 0 || number == SIGABRT) raise(number);
}

void signals_install(void) {
  static bool done; /* a forked child has them already */
  if (done) return;
  done = true;
  for (int i = 0; i < NUM_CRASH_SIGNALS; i++) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(crash_signals[i], &action, &before[i]);
  }
}

/* ---- for programs that know the library ------------------------------------------------------------------------- */

/* Writes out everything that was recorded until now. 0: done; 1: nothing is recorded; 2: it could not be written. */
__attribute__((visibility("default"))) int prism_nccl_flush(void) {
  if (!atomic_load(&prism.active)) return 1;
  return writer_drain(EXIT_PATIENCE_NS, END_EXIT) ? 0 : 2;
}

/* The file of this process; NULL while there is none. */
__attribute__((visibility("default"))) const char *prism_nccl_path(void) { return writer_path(); }
