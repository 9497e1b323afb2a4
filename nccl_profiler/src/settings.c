/* Reads the library's settings from PRISM_NCCL_* variables; it says what it does not understand, and goes on. */
#include "core.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define BIT(TYPE) (1u << (TYPE))

enum { DEFAULT_RING_KIB = 4096, DEFAULT_INTERVAL_US = 5000 };

/* no proxy steps, control or network events: those come by the thousand a collective */
#define DEFAULT_EVENTS                                                                                      \
  (BIT(EV_GROUP) | BIT(EV_COLL) | BIT(EV_P2P) | BIT(EV_PROXY_OP) | BIT(EV_KERNEL_CH) | BIT(EV_GROUP_API) |  \
   BIT(EV_COLL_API) | BIT(EV_P2P_API) | BIT(EV_KERNEL_LAUNCH) | BIT(EV_CE_COLL))

static const char *const names[EV_NUM] = {
    "group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl", "kernel_ch", "net", "group_api", "coll_api",
    "p2p_api", "kernel_launch", "ce_coll", "ce_sync", "ce_batch", "kernel_phase",
};

/* An event without its ancestors could not be told whose it is. */
static uint32_t with_ancestors(uint32_t mask) {
  if (mask & BIT(EV_NET)) mask |= BIT(EV_PROXY_STEP);
  if (mask & BIT(EV_PROXY_STEP)) mask |= BIT(EV_PROXY_OP);
  if (mask & BIT(EV_KERNEL_PHASE)) mask |= BIT(EV_KERNEL_CH);
  if (mask & (BIT(EV_PROXY_OP) | BIT(EV_KERNEL_CH))) mask |= BIT(EV_COLL) | BIT(EV_P2P);
  if (mask & (BIT(EV_CE_SYNC) | BIT(EV_CE_BATCH))) mask |= BIT(EV_CE_COLL);
  if (mask & (BIT(EV_COLL_API) | BIT(EV_P2P_API) | BIT(EV_KERNEL_LAUNCH))) mask |= BIT(EV_GROUP_API);
  return mask;
}

static uint32_t read_events(const char *text) {
  if (text == NULL || *text == 0 || strcmp(text, "default") == 0) return DEFAULT_EVENTS;
  if (strcmp(text, "all") == 0) return (1u << EV_NUM) - 1;
  char *end;
  unsigned long number = strtoul(text, &end, 0);
  if (end != text && *end == 0) return with_ancestors((uint32_t)number & ((1u << EV_NUM) - 1));
  uint32_t mask = 0;
  for (const char *word = text; *word;) {
    size_t length = strcspn(word, ",");
    bool known = length == 0;
    for (int type = 0; type < EV_NUM; type++)
      if (strlen(names[type]) == length && strncmp(names[type], word, length) == 0) {
        mask |= BIT(type);
        known = true;
      }
    if (length == 7 && strncmp(word, "default", 7) == 0) {
      mask |= DEFAULT_EVENTS;
      known = true;
    }
    if (!known)
      fprintf(stderr, "prism-nccl: PRISM_NCCL_EVENTS: there are no events %.*s: left out\n", (int)length, word);
    word += length;
    if (*word == ',') word++;
  }
  return with_ancestors(mask);
}

static long read_number(const char *variable, long otherwise, long least, long most) {
  const char *text = getenv(variable);
  if (text == NULL || *text == 0) return otherwise;
  char *end;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno == 0 && *end == 0 && value >= least && value <= most) return value;
  fprintf(stderr, "prism-nccl: %s=%s is not a number from %ld to %ld: %ld is used\n", variable, text, least, most,
          otherwise);
  return otherwise;
}

static int first_number(const char *const *variables) {
  for (; *variables; variables++) {
    const char *text = getenv(*variables);
    if (text && *text && strspn(text, "0123456789") == strlen(text) && strlen(text) < 10) return atoi(text);
  }
  return ABSENT_RANK;
}

/* %p is the process id, %r the rank (x where the environment has none), %% a percent sign. */
static void expand(char *target, size_t room, const char *pattern, int rank) {
  size_t used = 0;
  for (; *pattern && used + 12 < room; pattern++) {
    if (*pattern != '%' || pattern[1] == 0) {
      target[used++] = *pattern;
      continue;
    }
    pattern++;
    if (*pattern == 'p')
      used += (size_t)snprintf(target + used, room - used, "%d", (int)getpid());
    else if (*pattern == 'r' && rank >= 0)
      used += (size_t)snprintf(target + used, room - used, "%05d", rank);
    else
      target[used++] = *pattern == 'r' ? 'x' : *pattern;
  }
  target[used] = 0;
}

void settings_read(struct settings *settings) {
  static const char *const ranks[] = {"PRISM_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", NULL};
  static const char *const local_ranks[] = {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", NULL};
  static const char *const sizes[] = {"PRISM_WORLD_SIZE", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", NULL};
  settings->rank = first_number(ranks);
  settings->local_rank = first_number(local_ranks);
  settings->world_size = first_number(sizes);
  settings->event_mask = read_events(getenv("PRISM_NCCL_EVENTS"));
  settings->sample_every = (uint32_t)read_number("PRISM_NCCL_SAMPLE", 1, 1, 1000000);
  settings->interval_ns = 1000l * read_number("PRISM_NCCL_INTERVAL_US", DEFAULT_INTERVAL_US, 100, 10000000);
  settings->catch_signals = read_number("PRISM_NCCL_SIGNALS", 1, 0, 1) != 0;
  uint64_t bytes = 1024ull * (uint64_t)read_number("PRISM_NCCL_RING_KIB", DEFAULT_RING_KIB, 4, 1 << 20);
  settings->ring_records = 128;
  while (settings->ring_records * 2 * sizeof(union record) <= bytes) settings->ring_records *= 2;

  const char *given = getenv("PRISM_NCCL_OUTPUT");
  char pattern[900];
  struct stat status;
  if (given == NULL || *given == 0) given = ".";
  if (given[strlen(given) - 1] == '/' || (stat(given, &status) == 0 && S_ISDIR(status.st_mode)))
    snprintf(pattern, sizeof pattern, "%s/nccl-rank-%%r-pid-%%p.ncclrec", given);
  else
    snprintf(pattern, sizeof pattern, "%s", given);
  expand(settings->path, sizeof settings->path, pattern, settings->rank);
}
