/* A program that plays NCCL: loads the plugin as NCCL does and calls it from several threads, in several scenarios.
 *
 *     host LIBRARY VERSION SCENARIO NUM_COLLECTIVES [NUM_COMMS [NUM_CHANNELS [EVENTS_PER_S]]]
 *
 * Each communicator has a thread that calls and one that plays the proxy, as in NCCL. The GPU's clock is the host's
 * with an offset of 123 s and 20 us more a second. It prints what it did as one JSON object.
 */
#include "plays_nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE = 4096 };

struct work { void *handle; int64_t launched_ns; uint64_t seq; };

struct job {
  struct player player;
  pthread_t caller, proxy;
  void *context;
  uint64_t hash;
  int rank, num_channels;
  long num_collectives;
  double events_per_s; /* 0: as fast as can be */
  struct work queue[QUEUE];
  _Atomic long pushed, popped;
  _Atomic bool is_done;
};

static const char *scenario = "";
static bool plays(const char *name) { return strcmp(scenario, name) == 0; }

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t gpu_time(int64_t host_ns) { return (uint64_t)(host_ns + 123000000000 + host_ns / 50000); }

static void push(struct job *job, struct work work) {
  long at = atomic_load_explicit(&job->pushed, memory_order_relaxed);
  while (at - atomic_load_explicit(&job->popped, memory_order_acquire) >= QUEUE) sched_yield();
  job->queue[at % QUEUE] = work;
  atomic_store_explicit(&job->pushed, at + 1, memory_order_release);
}

/* One collective with everything that NCCL says around it. */
static void call_collective(struct job *job, uint64_t seq) {
  struct player *p = &job->player;
  void *context = job->context, *group_api = play_group_api(p, context);
  void *api = play_coll_api(p, context, group_api, "AllReduce", 1000 + seq, "ncclFloat32");
  play_state(p, group_api, 23, 0);
  play_stop(p, api);
  play_state(p, group_api, 24, 0);
  void *launch = play_launch(p, context, group_api);
  int64_t launched = now_ns();
  play_stop(p, launch);
  void *group = play_group(p, context);
  void *coll = play_coll(p, context, api, group, job->hash, job->rank, seq, 1000 + seq, job->num_channels);
  push(job, (struct work){coll, launched, seq});
  bool is_lost = plays("missing") && seq % 7 == 0;
  if (!is_lost) play_stop(p, coll);
  play_stop(p, group);
  play_stop(p, group_api);
}

static void call_message(struct job *job, uint64_t seq) {
  struct player *p = &job->player;
  void *group_api = play_group_api(p, job->context);
  void *send_api = play_p2p_api(p, job->context, group_api, "Send", 64, "ncclBfloat16");
  play_stop(p, send_api);
  void *recv_api = play_p2p_api(p, job->context, group_api, "Recv", 64, "ncclBfloat16");
  play_stop(p, recv_api);
  void *launch = play_launch(p, job->context, group_api);
  int64_t launched = now_ns();
  play_stop(p, launch);
  void *group = play_group(p, job->context);
  void *send = play_p2p(p, job->context, send_api, group, job->hash, job->rank, 1, 64, 1);
  void *recv = play_p2p(p, job->context, recv_api, group, job->hash, job->rank, 1, 64, 0);
  push(job, (struct work){send, launched, seq});
  push(job, (struct work){recv, launched, seq});
  play_stop(p, send);
  play_stop(p, recv);
  play_stop(p, group);
  play_stop(p, group_api);
}

static void progress(struct job *job, struct work work) {
  struct player *p = &job->player;
  void *kernels[64];
  for (int channel = 0; channel < job->num_channels; channel++)
    kernels[channel] = play_kernel(p, job->context, work.handle, channel, gpu_time(work.launched_ns + 150 + channel));
  void *op = play_proxy_op(p, job->context, work.handle, (int)getpid(), 1);
  play_state(p, op, 19, 0);
  if (work.seq % 64 == 0) {
    void *step = play_proxy_step(p, job->context, op, 0);
    void *net = play_net(p, job->context, step);
    play_stop(p, net);
    play_state(p, step, 9, 65536);
    play_stop(p, step);
  }
  for (int i = 0; i < job->num_channels; i++) {
    int channel = plays("reorder") ? job->num_channels - 1 - i : i;
    if (plays("missing") && work.seq % 5 == 0 && channel == 0) continue;
    int64_t now = now_ns();
    int64_t begin = work.launched_ns + 150 + channel;
    while (now < begin) now = now_ns();
    int64_t end = now - 100 > begin ? now - 100 : now;
    if (work.seq % 64 == 0 && kernels[channel]) {
      void *phase = play_phase(p, job->context, kernels[channel], channel, gpu_time(begin));
      play_state(p, phase, ST_KERNEL_PHASE_STOP, gpu_time(end));
      play_stop(p, phase);
    }
    play_state(p, kernels[channel], ST_KERNEL_CH_STOP, gpu_time(end));
    play_stop(p, kernels[channel]);
  }
  play_stop(p, op);
  if (plays("reorder") && work.seq % 11 == 0) play_stop(p, op); /* twice */
}

static void *be_proxy(void *argument) {
  struct job *job = argument;
  for (;;) {
    long at = atomic_load_explicit(&job->popped, memory_order_relaxed);
    bool is_done = atomic_load_explicit(&job->is_done, memory_order_acquire);
    if (at == atomic_load_explicit(&job->pushed, memory_order_acquire)) {
      if (is_done) return NULL;
      sched_yield();
      continue;
    }
    progress(job, job->queue[at % QUEUE]);
    atomic_store_explicit(&job->popped, at + 1, memory_order_release);
  }
}

static void *be_caller(void *argument) {
  struct job *job = argument;
  int64_t start = now_ns();
  long events_each = 5 + 2 + job->num_channels;
  for (long seq = 0; seq < job->num_collectives; seq++) {
    if (job->events_per_s > 0)
      while ((double)(now_ns() - start) * job->events_per_s < 1e9 * (double)(seq * events_each)) {}
    call_collective(job, (uint64_t)seq);
    if (seq % 32 == 0) call_message(job, (uint64_t)seq);
    if (seq % 128 == 0) play_stop(&job->player, play_ce_coll(&job->player, job->context, NULL, (uint64_t)seq, 512));
    if (seq % 100 == 0) play_unknown(&job->player, job->context);
  }
  atomic_store_explicit(&job->is_done, true, memory_order_release);
  return NULL;
}

static void *be_short(void *argument) {
  struct job *job = argument;
  void *group = play_group(&job->player, job->context);
  play_stop(&job->player, group);
  return NULL;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Nanoseconds a callback, as the median of batches: each batch is the callbacks of 50 collectives of one thread. */
static void measure(struct job *job, long num) {
  enum { EACH = 50 };
  struct player *p = &job->player;
  long num_batches = num / EACH;
  double *start = calloc((size_t)num_batches, sizeof *start), *stop = calloc((size_t)num_batches, sizeof *stop);
  double *state = calloc((size_t)num_batches, sizeof *state), *kernel = calloc((size_t)num_batches, sizeof *kernel);
  void *colls[EACH], *kernels[EACH];
  for (long b = 0; b < num_batches; b++) {
    int64_t t0 = now_ns();
    for (int i = 0; i < EACH; i++)
      colls[i] = play_coll(p, job->context, NULL, NULL, job->hash, 0, (uint64_t)(b * EACH + i), 4096, 24);
    int64_t t1 = now_ns();
    for (int i = 0; i < EACH; i++) kernels[i] = play_kernel(p, job->context, colls[i], i, 1000);
    int64_t t2 = now_ns();
    for (int i = 0; i < EACH; i++) play_state(p, kernels[i], ST_KERNEL_CH_STOP, 2000);
    int64_t t3 = now_ns();
    for (int i = 0; i < EACH; i++) play_stop(p, colls[i]);
    int64_t t4 = now_ns();
    for (int i = 0; i < EACH; i++) play_stop(p, kernels[i]);
    start[b] = (double)(t1 - t0) / EACH;
    kernel[b] = (double)(t2 - t1) / EACH;
    state[b] = (double)(t3 - t2) / EACH;
    stop[b] = (double)(t4 - t3) / EACH;
    while (b % 8 == 7 && now_ns() - t4 < 300000) {} /* the writer keeps up, as with a real job's pauses */
  }
  double *all[] = {start, kernel, state, stop};
  const char *names[] = {"start_coll", "start_kernel", "record_state", "stop"};
  for (int i = 0; i < 4; i++) {
    qsort(all[i], (size_t)num_batches, sizeof(double), compare);
    printf("\"%s_ns\": %.1f, \"%s_p99_ns\": %.1f, ", names[i], all[i][num_batches / 2], names[i],
           all[i][num_batches * 99 / 100]);
    free(all[i]);
  }
}

static void report(void) {
  const char *names[EV_NUM] = {"group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl", "kernel_ch", "net",
                               "group_api", "coll_api", "p2p_api", "kernel_launch", "ce_coll", "ce_sync", "ce_batch",
                               "kernel_phase"};
  printf("\"started\": {");
  for (int i = 0; i < EV_NUM; i++) printf("%s\"%s\": %ld", i ? ", " : "", names[i], atomic_load(&tally.started[i]));
  printf("}, \"refused\": {");
  for (int i = 0; i < EV_NUM; i++) printf("%s\"%s\": %ld", i ? ", " : "", names[i], atomic_load(&tally.refused[i]));
  printf("}, \"stopped\": %ld, \"states\": %ld, \"errors\": %ld}\n", atomic_load(&tally.stopped),
         atomic_load(&tally.states), atomic_load(&tally.errors));
  fflush(stdout);
}

static void run(struct job *jobs, int num_jobs) {
  for (int i = 0; i < num_jobs; i++) {
    atomic_store(&jobs[i].is_done, false);
    pthread_create(&jobs[i].proxy, NULL, be_proxy, &jobs[i]);
    pthread_create(&jobs[i].caller, NULL, be_caller, &jobs[i]);
  }
  for (int i = 0; i < num_jobs; i++) {
    pthread_join(jobs[i].caller, NULL);
    pthread_join(jobs[i].proxy, NULL);
  }
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
  int version = atoi(argv[2]);
  scenario = argv[3];
  long num = atol(argv[4]);
  int num_jobs = argc > 5 ? atoi(argv[5]) : 1, num_channels = argc > 6 ? atoi(argv[6]) : 4;
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
  void *table = dlsym(library, symbol);
  if (!table) return fprintf(stderr, "no %s\n", symbol), 2;

  struct job *jobs = calloc((size_t)num_jobs, sizeof *jobs);
  int mask = -1;
  for (int i = 0; i < num_jobs; i++) {
    jobs[i].player = (struct player){version, table};
    jobs[i].hash = 0x1000u + (unsigned)i;
    jobs[i].rank = i;
    jobs[i].num_channels = num_channels;
    jobs[i].num_collectives = num;
    jobs[i].events_per_s = argc > 7 ? atof(argv[7]) / num_jobs : 0;
    char name[16]; /* gone when init returns: the plugin has to copy it */
    snprintf(name, sizeof name, "comm%d", i);
    jobs[i].context = play_init(&jobs[i].player, jobs[i].hash, name, 8, i, &mask);
    memset(name, 'x', sizeof name - 1);
  }
  printf("{\"mask\": %d, \"has_context\": %s, ", mask, jobs[0].context ? "true" : "false");
  int64_t began = now_ns();
  if (plays("measure")) {
    measure(&jobs[0], num);
  } else if (plays("churn")) { /* more threads over time than there are rings */
    for (long i = 0; i < num; i++) {
      pthread_t thread;
      pthread_create(&thread, NULL, be_short, &jobs[0]);
      pthread_join(thread, NULL);
      if (i % 100 == 99) usleep(300000);
    }
  } else {
    run(jobs, num_jobs);
  }
  printf("\"wall_ns\": %lld, ", (long long)(now_ns() - began));
  if (plays("fork")) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) { /* what the parent began means nothing here; a communicator of its own does */
      play_stop(&jobs[0].player, play_group(&jobs[0].player, jobs[0].context));
      void *context = play_init(&jobs[0].player, 0x2000, "child", 2, 0, &mask);
      for (int i = 0; i < 10; i++) play_stop(&jobs[0].player, play_group(&jobs[0].player, context));
      play_finalize(&jobs[0].player, context);
      exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status) atomic_fetch_add(&tally.errors, 1);
  }
  report();
  if (plays("crash")) *(volatile int *)NULL = 1;
  if (plays("abort")) abort();
  if (plays("kill")) {
    usleep(200000);
    raise(SIGKILL);
  }
  if (plays("exit")) exit(0);
  for (int i = 0; i < num_jobs; i++) play_finalize(&jobs[i].player, jobs[i].context);
  if (plays("late")) { /* an aborted communicator: callbacks after finalize, then the library is closed */
    void *group = play_group(&jobs[0].player, jobs[0].context);
    play_stop(&jobs[0].player, group);
    dlclose(library);
    play_stop(&jobs[0].player, group);
  }
  return atomic_load(&tally.errors) ? 1 : 0;
}
