/* Versions 1 to 3 of the interface (NCCL 2.23 to 2.26): communicators are named by their events, not at init. */
#include "events.h"

/* Version 1 hands over numbers; these are their names, as later versions say them. */
static const char *const funcs[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce", "SendRecv",
                                    "Send", "Recv"};
static const char *const algos[] = {"TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT"};
static const char *const protos[] = {"LL", "LL128", "SIMPLE"};
static const char *const dtypes[] = {"ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64",
                                     "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3",
                                     "ncclFloat8e5m2"};
#define NAME(TABLE, NUMBER) ((NUMBER) < sizeof TABLE / sizeof TABLE[0] ? TABLE[NUMBER] : NULL)

static abi_result init_old(int version, void **context, int *mask) {
  struct comm *comm = comm_create(version, NULL, 0, 0, 0, ABSENT_RANK, NULL);
  *context = comm;
  *mask = comm ? (int)(prism.event_mask & (version < 3 ? 0x3fu : 0xffu)) : 0;
  return ABI_SUCCESS;
}

static inline void learn(struct comm *comm, uint64_t hash, int rank, const char *name) {
  if (comm && UNLIKELY(atomic_load_explicit(&comm->hash, memory_order_relaxed) == 0)) comm_learn(comm, hash, rank, name);
}

#define IN_PLACE(COLL) ((COLL)->send == (COLL)->recv ? FLAG_IN_PLACE : 0)

static abi_result start_v1(void *context, void **handle, struct descr_v1 *event) {
  struct comm *comm = context;
  *handle = NULL;
  switch (event->type) {
  case 1 << EV_GROUP: write_plain(comm, EV_GROUP, NULL, 0, 0, 0, handle); break;
  case 1 << EV_COLL: {
    const struct coll_v1 *coll = &event->coll;
    learn(comm, coll->comm_hash, event->rank, coll->comm_name);
    if (leaves_out(comm, coll->seq)) break;
    struct task task = {
        .func = NAME(funcs, coll->func), .dtype = NAME(dtypes, coll->dtype), .algo = NAME(algos, coll->algo),
        .proto = NAME(protos, coll->proto), .count = coll->count, .seq = (int64_t)coll->seq, .root = coll->root,
        .group = event->parent, .channels = coll->channels, .warps = coll->warps,
        .flags = (uint8_t)(IN_PLACE(coll) | (coll->is_collnet ? FLAG_COLLNET : 0) | (coll->is_nvls ? FLAG_NVLS : 0))};
    write_task(comm, EV_COLL, event->parent, &task, handle);
    break;
  }
  case 1 << EV_P2P: {
    const struct p2p_v1 *p2p = &event->p2p;
    learn(comm, p2p->comm_hash, event->rank, p2p->comm_name);
    if (leaves_out_message(comm)) break;
    struct task task = {.func = NAME(funcs, p2p->func), .dtype = NAME(dtypes, p2p->dtype), .count = p2p->count,
                        .seq = ABSENT_SEQ, .root = p2p->peer, .group = event->parent};
    write_task(comm, EV_P2P, event->parent, &task, handle);
    break;
  }
  case 1 << EV_PROXY_OP: write_proxy_op(comm, event->parent, &event->op, handle); break;
  case 1 << EV_PROXY_STEP:
    write_numbers(comm, EV_PROXY_STEP, event->parent, 0, 0, (uint32_t)event->step.step, 0, handle);
    break;
  case 1 << EV_PROXY_CTRL: write_plain(comm, EV_PROXY_CTRL, NULL, 0, 0, 0, handle); break;
  default: break;
  }
  return ABI_SUCCESS;
}

/* Versions 2 and 3 differ in where things lie, not in what there is. */
#define START_OLD(VERSION, DESCR, COLL, EXTRA)                                                                        \
  static abi_result start_v##VERSION(void *context, void **handle, struct DESCR *event) {                             \
    struct comm *comm = context;                                                                                      \
    *handle = NULL;                                                                                                   \
    switch (event->type) {                                                                                            \
    case 1 << EV_GROUP: write_plain(comm, EV_GROUP, NULL, 0, 0, 0, handle); break;                                    \
    case 1 << EV_COLL: {                                                                                              \
      const struct COLL *coll = &event->coll;                                                                         \
      learn(comm, coll->comm_hash, event->rank, coll->comm_name);                                                     \
      if (leaves_out(comm, coll->seq)) break;                                                                         \
      struct task task = {.func = coll->func, .dtype = coll->dtype, .algo = coll->algo, .proto = coll->proto,         \
                          .count = coll->count, .seq = (int64_t)coll->seq, .root = coll->root,                        \
                          .group = event->parent, .channels = coll->channels, .warps = coll->warps,                   \
                          .flags = IN_PLACE(coll)};                                                                   \
      write_task(comm, EV_COLL, event->parent, &task, handle);                                                        \
      break;                                                                                                          \
    }                                                                                                                 \
    case 1 << EV_P2P: {                                                                                               \
      const struct p2p_v2 *p2p = &event->p2p;                                                                         \
      learn(comm, p2p->comm_hash, event->rank, p2p->comm_name);                                                       \
      if (leaves_out_message(comm)) break;                                                                            \
      struct task task = {.func = p2p->func, .dtype = p2p->dtype, .count = p2p->count, .seq = ABSENT_SEQ,             \
                          .root = p2p->peer, .group = event->parent};                                                 \
      write_task(comm, EV_P2P, event->parent, &task, handle);                                                         \
      break;                                                                                                          \
    }                                                                                                                 \
    case 1 << EV_PROXY_OP: write_proxy_op(comm, event->parent, &event->op, handle); break;                            \
    case 1 << EV_PROXY_STEP:                                                                                          \
      write_numbers(comm, EV_PROXY_STEP, event->parent, 0, 0, (uint32_t)event->step.step, 0, handle);                 \
      break;                                                                                                          \
    case 1 << EV_PROXY_CTRL: write_plain(comm, EV_PROXY_CTRL, NULL, 0, 0, 0, handle); break;                          \
      EXTRA                                                                                                           \
    default: break;                                                                                                   \
    }                                                                                                                 \
    return ABI_SUCCESS;                                                                                               \
  }

START_OLD(2, descr_v2, coll_v2, )
/* version 3 has kernel channels, without GPU times yet: 0 says so */
START_OLD(3, descr_v3, coll_v3,
          case 1 << EV_KERNEL_CH:
            write_numbers(comm, EV_KERNEL_CH, event->parent, event->kernel.channel, 0, 0, 0, handle); break;
          case 1 << EV_NET: write_net(comm, event->parent, &event->net, handle); break;)

static abi_result record_state_old(void *handle, int state, union state_v1 *arguments) {
  uint64_t value = 0;
  if (arguments && ID_TYPE((uintptr_t)handle) == EV_PROXY_OP)
    value = arguments->op.num_bytes;
  else if (arguments && ID_TYPE((uintptr_t)handle) == EV_PROXY_CTRL)
    value = (uint32_t)arguments->ctrl.num_appended;
  return record_state(handle, state, value);
}

static abi_result init_v1(void **context, int *mask) { return init_old(1, context, mask); }
static abi_result init_v2(void **context, int *mask) { return init_old(2, context, mask); }
static abi_result init_v3(void **context, int *mask) { return init_old(3, context, mask); }
static abi_result stop_old(void *handle) { return stop_event(handle); }
static abi_result finalize_old(void *context) { return finalize(context); }

/* Forks of NCCL look for further entry points behind a table: they find NULL. */
#define EXPORT(VERSION)                                                                                      \
  __attribute__((visibility("default"))) const struct {                                                     \
    struct table_v##VERSION table;                                                                           \
    void *nothing[8];                                                                                        \
  } ncclProfiler_v##VERSION = {                                                                              \
      {"Prism", init_v##VERSION, start_v##VERSION, stop_old, record_state_old, finalize_old}, {NULL}};

EXPORT(1)
EXPORT(2)
EXPORT(3)
