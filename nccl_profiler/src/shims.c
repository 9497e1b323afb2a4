/* Versions 4 to 7 of the interface (NCCL 2.27 to the newest): communicators are named at init. */
#include "events.h"

static const uint32_t masks[] = {[4] = 0xff, [5] = 0xfff, [6] = 0x7fff, [7] = 0xffff};

static abi_result init_new(int version, void **context, uint64_t hash, int *mask, const char *name, int num_nodes,
                           int num_ranks, int rank, abi_logger logger) {
  struct comm *comm = comm_create(version, name, hash, num_nodes, num_ranks, rank, logger);
  *context = comm;
  *mask = comm ? (int)(prism.event_mask & masks[version]) : 0;
  return ABI_SUCCESS;
}

static abi_result init_v4(void **context, int *mask, const char *name, uint64_t hash, int num_nodes, int num_ranks,
                          int rank, abi_logger logger) {
  return init_new(4, context, hash, mask, name, num_nodes, num_ranks, rank, logger);
}
#define INIT(VERSION)                                                                                                \
  static abi_result init_v##VERSION(void **context, uint64_t hash, int *mask, const char *name, int num_nodes,      \
                                    int num_ranks, int rank, abi_logger logger) {                                    \
    return init_new(VERSION, context, hash, mask, name, num_nodes, num_ranks, rank, logger);                         \
  }
INIT(5)
INIT(6)
INIT(7)

/* `group` is the launch that a task went in, `extra` what later versions add. */
static inline void start_coll(struct comm *comm, const void *parent, const struct coll_v4 *coll, const void *group,
                              const struct coll_v7 *extra, void **handle) {
  if (leaves_out(comm, coll->seq)) return;
  struct task task = {
      .func = coll->func, .dtype = coll->dtype, .algo = coll->algo, .proto = coll->proto, .count = coll->count,
      .seq = (int64_t)coll->seq, .root = coll->root, .group = group, .channels = coll->channels,
      .warps = coll->warps, .flags = coll->send == coll->recv ? FLAG_IN_PLACE : 0};
  if (extra) {
    task.variant = extra->variant;
    task.user_tag = extra->user_tag;
    if (extra->is_symmetric) task.flags |= FLAG_SYMMETRIC;
  }
  write_task(comm, EV_COLL, parent, &task, handle);
}

static inline void start_p2p(struct comm *comm, const void *parent, const struct p2p_v4 *p2p, const void *group,
                             uint64_t user_tag, void **handle) {
  if (leaves_out_message(comm)) return;
  struct task task = {.func = p2p->func, .dtype = p2p->dtype, .count = p2p->count, .seq = ABSENT_SEQ,
                      .root = p2p->peer, .group = group, .channels = p2p->channels, .user_tag = user_tag};
  write_task(comm, EV_P2P, parent, &task, handle);
}

static inline void start_coll_api(struct comm *comm, const void *parent, const struct coll_api_v5 *api,
                                  uint64_t user_tag, void **handle) {
  struct task task = {.func = api->func, .dtype = api->dtype, .count = api->count, .seq = ABSENT_SEQ,
                      .root = api->root, .stream = api->stream, .user_tag = user_tag,
                      .flags = api->is_captured ? FLAG_CAPTURED : 0};
  write_task(comm, EV_COLL_API, parent, &task, handle);
}

static inline void start_p2p_api(struct comm *comm, const void *parent, const struct p2p_api_v5 *api,
                                 uint64_t user_tag, void **handle) {
  struct task task = {.func = api->func, .dtype = api->dtype, .count = api->count, .seq = ABSENT_SEQ,
                      .root = ABSENT_RANK, .stream = api->stream, .user_tag = user_tag,
                      .flags = api->is_captured ? FLAG_CAPTURED : 0};
  write_task(comm, EV_P2P_API, parent, &task, handle);
}

static inline void start_ce_coll(struct comm *comm, const void *parent, const struct ce_coll_v6 *ce, uint64_t user_tag,
                                 void **handle) {
  struct task task = {.func = ce->func, .dtype = ce->dtype, .algo = "CE", .variant = ce->sync, .count = ce->count,
                      .seq = (int64_t)ce->seq, .root = ce->root, .stream = ce->stream, .user_tag = user_tag,
                      .flags = ce->send == ce->recv ? FLAG_IN_PLACE : 0};
  write_task(comm, EV_CE_COLL, parent, &task, handle);
}

#define CASES_V4                                                                                                    \
  case 1 << EV_GROUP: write_plain(comm, EV_GROUP, NULL, 0, 0, 0, handle); break;                                    \
  case 1 << EV_PROXY_OP: write_proxy_op(comm, event->parent, &event->op, handle); break;                            \
  case 1 << EV_PROXY_STEP:                                                                                          \
    write_numbers(comm, EV_PROXY_STEP, event->parent, 0, 0, (uint32_t)event->step.step, 0, handle);                 \
    break;                                                                                                          \
  case 1 << EV_PROXY_CTRL: write_plain(comm, EV_PROXY_CTRL, NULL, 0, 0, 0, handle); break;                          \
  case 1 << EV_KERNEL_CH:                                                                                           \
    write_numbers(comm, EV_KERNEL_CH, event->parent, event->kernel.channel, 0, event->kernel.gpu_ns, 0, handle);    \
    break;                                                                                                          \
  case 1 << EV_NET: write_net(comm, event->parent, &event->net, handle); break;

#define CASES_V5                                                                                                    \
  CASES_V4                                                                                                          \
  case 1 << EV_GROUP_API:                                                                                           \
    write_plain(comm, EV_GROUP_API, NULL, event->group_api.is_captured, 0, (uint16_t)event->group_api.depth, handle); \
    break;                                                                                                          \
  case 1 << EV_KERNEL_LAUNCH:                                                                                       \
    write_numbers(comm, EV_KERNEL_LAUNCH, event->parent, 0, 0, (uint64_t)(uintptr_t)event->launch.stream, 0, handle); \
    break;

#define CASES_V6                                                                                                    \
  CASES_V5                                                                                                          \
  case 1 << EV_CE_SYNC:                                                                                             \
    write_numbers(comm, EV_CE_SYNC, event->parent, event->ce_sync.is_complete, 0,                                   \
                  (uint32_t)event->ce_sync.num_ranks, 0, handle);                                                   \
    break;                                                                                                          \
  case 1 << EV_CE_BATCH:                                                                                            \
    write_numbers(comm, EV_CE_BATCH, event->parent, event->ce_batch.use_intra_sync, 0,                              \
                  (uint32_t)event->ce_batch.num_ops, event->ce_batch.num_bytes, handle);                            \
    break;

#define START(VERSION, CASES)                                                                     \
  static abi_result start_v##VERSION(void *context, void **handle, struct descr_v##VERSION *event) { \
    struct comm *comm = context;                                                                  \
    *handle = NULL;                                                                               \
    switch (event->type) {                                                                        \
      CASES                                                                                       \
    default: break;                                                                               \
    }                                                                                             \
    return ABI_SUCCESS;                                                                           \
  }

START(4, CASES_V4
  case 1 << EV_COLL: start_coll(comm, event->parent, &event->coll, event->parent, NULL, handle); break;
  case 1 << EV_P2P: start_p2p(comm, event->parent, &event->p2p, event->parent, 0, handle); break;)

#define TASKS_V5                                                                                                    \
  case 1 << EV_COLL:                                                                                                \
    start_coll(comm, event->parent, &event->coll.base, event->coll.group, NULL, handle);                            \
    break;                                                                                                          \
  case 1 << EV_P2P:                                                                                                 \
    start_p2p(comm, event->parent, &event->p2p.base, event->p2p.group, 0, handle);                                  \
    break;                                                                                                          \
  case 1 << EV_COLL_API: start_coll_api(comm, event->parent, &event->coll_api, 0, handle); break;                   \
  case 1 << EV_P2P_API: start_p2p_api(comm, event->parent, &event->p2p_api, 0, handle); break;

START(5, CASES_V5 TASKS_V5)
START(6, CASES_V6 TASKS_V5
  case 1 << EV_CE_COLL: start_ce_coll(comm, event->parent, &event->ce_coll, 0, handle); break;)
START(7, CASES_V6
  case 1 << EV_COLL:
    start_coll(comm, event->parent, &event->coll.base.base, event->coll.base.group, &event->coll, handle);
    break;
  case 1 << EV_P2P:
    start_p2p(comm, event->parent, &event->p2p.base.base, event->p2p.base.group, event->p2p.user_tag, handle);
    break;
  case 1 << EV_COLL_API:
    start_coll_api(comm, event->parent, &event->coll_api.base, event->coll_api.user_tag, handle);
    break;
  case 1 << EV_P2P_API:
    start_p2p_api(comm, event->parent, &event->p2p_api.base, event->p2p_api.user_tag, handle);
    break;
  case 1 << EV_CE_COLL:
    start_ce_coll(comm, event->parent, &event->ce_coll.base, event->ce_coll.user_tag, handle);
    break;
  case 1 << EV_KERNEL_PHASE:
    write_numbers(comm, EV_KERNEL_PHASE, event->parent, event->phase.channel, event->phase.phase, event->phase.gpu_ns,
                  0, handle);
    break;)

static abi_result record_state_new(void *handle, int state, union state_v4 *arguments) {
  uint64_t value = 0;
  if (arguments) { /* what it holds depends on the event; a pointer is of no use later */
    if (state == ST_KERNEL_CH_STOP || state == ST_KERNEL_PHASE_STOP) value = arguments->gpu_ns;
    else if (ID_TYPE((uintptr_t)handle) == EV_PROXY_STEP) value = arguments->num_bytes;
    else if (ID_TYPE((uintptr_t)handle) == EV_PROXY_CTRL) value = (uint32_t)arguments->num_appended;
  }
  return record_state(handle, state, value);
}

static abi_result stop_new(void *handle) { return stop_event(handle); }
static abi_result finalize_new(void *context) { return finalize(context); }

/* Forks of NCCL look for further entry points behind a table: they find NULL. */
#define EXPORT(VERSION)                                                                                      \
  __attribute__((visibility("default"))) const struct {                                                     \
    struct table_v##VERSION table;                                                                           \
    void *nothing[8];                                                                                        \
  } ncclProfiler_v##VERSION = {                                                                              \
      {"Prism", init_v##VERSION, start_v##VERSION, stop_new, record_state_new, finalize_new}, {NULL}};

EXPORT(4)
EXPORT(5)
EXPORT(6)
EXPORT(7)
