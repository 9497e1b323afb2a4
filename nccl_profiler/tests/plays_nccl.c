/* Builds descriptors of every version and hands them to the plugin, as NCCL does. It decides nothing. */
#include "plays_nccl.h"

#include <string.h>

struct tally tally;

#define EACH(DO)                    \
  switch (p->version) {             \
  case 1: DO(1) break;              \
  case 2: DO(2) break;              \
  case 3: DO(3) break;              \
  case 4: DO(4) break;              \
  case 5: DO(5) break;              \
  case 6: DO(6) break;              \
  case 7: DO(7) break;              \
  }
#define SINCE(FIRST, DO)                            \
  if (p->version >= FIRST) SINCE_##FIRST(DO)
#define SINCE_3(DO)                 \
  switch (p->version) {             \
  case 3: DO(3) break;              \
  case 4: DO(4) break;              \
  case 5: DO(5) break;              \
  case 6: DO(6) break;              \
  case 7: DO(7) break;              \
  }
#define SINCE_5(DO)                 \
  switch (p->version) {             \
  case 5: DO(5) break;              \
  case 6: DO(6) break;              \
  case 7: DO(7) break;              \
  }
#define SINCE_6(DO)                 \
  switch (p->version) {             \
  case 6: DO(6) break;              \
  case 7: DO(7) break;              \
  }

static void check(abi_result result) {
  if (result != ABI_SUCCESS) atomic_fetch_add(&tally.errors, 1);
}

static void *counted(int type, void *handle) {
  atomic_fetch_add_explicit(handle ? &tally.started[type] : &tally.refused[type], 1, memory_order_relaxed);
  return handle;
}

/* the handle is not NULL before: the plugin has to set it */
#define SEND(V, TYPE, PARENT, RANK, FILL)                                \
  {                                                                      \
    struct descr_v##V event;                                             \
    memset(&event, 0, sizeof event);                                     \
    event.type = 1 << (TYPE);                                            \
    event.parent = (PARENT);                                             \
    event.rank = (RANK);                                                 \
    FILL;                                                                \
    check(((struct table_v##V *)p->table)->start(context, &handle, &event)); \
  }
#define GARBAGE ((void *)0xdeadbeef)

static void logger(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

void *play_init(struct player *p, uint64_t hash, const char *name, int num_ranks, int rank, int *mask) {
  void *context = NULL;
  switch (p->version) {
  case 1: check(((struct table_v1 *)p->table)->init(&context, mask)); break;
  case 2: check(((struct table_v2 *)p->table)->init(&context, mask)); break;
  case 3: check(((struct table_v3 *)p->table)->init(&context, mask)); break;
  case 4: check(((struct table_v4 *)p->table)->init(&context, mask, name, hash, 1, num_ranks, rank, logger)); break;
  case 5: check(((struct table_v5 *)p->table)->init(&context, hash, mask, name, 1, num_ranks, rank, logger)); break;
  case 6: check(((struct table_v6 *)p->table)->init(&context, hash, mask, name, 1, num_ranks, rank, logger)); break;
  case 7: check(((struct table_v7 *)p->table)->init(&context, hash, mask, name, 1, num_ranks, rank, logger)); break;
  }
  return context;
}

void play_finalize(struct player *p, void *context) {
  if (context) check(((struct table_v1 *)p->table)->finalize(context)); /* at the same place in every version */
}

void *play_group_api(struct player *p, void *context) {
  void *handle = p->version >= 5 ? GARBAGE : NULL;
#define DO(V) SEND(V, EV_GROUP_API, NULL, 0, event.group_api.depth = 1)
  SINCE(5, DO)
#undef DO
  return p->version >= 5 ? counted(EV_GROUP_API, handle) : NULL;
}

#define BASE_OF_5(MEMBER) event.MEMBER
#define BASE_OF_6(MEMBER) event.MEMBER
#define BASE_OF_7(MEMBER) event.MEMBER.base

void *play_coll_api(struct player *p, void *context, void *parent, const char *func, size_t count, const char *dtype) {
  void *handle = GARBAGE;
  if (p->version < 5) return NULL;
#define DO(V)                                                                                     \
  SEND(V, EV_COLL_API, parent, 0, BASE_OF_##V(coll_api) = ((struct coll_api_v5){func, count, dtype, 0, NULL, false}))
  SINCE(5, DO)
#undef DO
  return counted(EV_COLL_API, handle);
}

void *play_p2p_api(struct player *p, void *context, void *parent, const char *func, size_t count, const char *dtype) {
  void *handle = GARBAGE;
  if (p->version < 5) return NULL;
#define DO(V)                                                                                     \
  SEND(V, EV_P2P_API, parent, 0, BASE_OF_##V(p2p_api) = ((struct p2p_api_v5){func, count, dtype, NULL, false}))
  SINCE(5, DO)
#undef DO
  return counted(EV_P2P_API, handle);
}

void *play_launch(struct player *p, void *context, void *parent) {
  void *handle = GARBAGE;
  if (p->version < 5) return NULL;
#define DO(V) SEND(V, EV_KERNEL_LAUNCH, parent, 0, event.launch.stream = NULL)
  SINCE(5, DO)
#undef DO
  return counted(EV_KERNEL_LAUNCH, handle);
}

void *play_group(struct player *p, void *context) {
  void *handle = GARBAGE;
#define DO(V) SEND(V, EV_GROUP, NULL, 0, (void)0)
  EACH(DO)
#undef DO
  return counted(EV_GROUP, handle);
}

void *play_coll(struct player *p, void *context, void *api, void *group, uint64_t hash, int rank, uint64_t seq,
                size_t count, int num_channels) {
  void *handle = GARBAGE;
  void *buffer = &tally;
  struct coll_v4 base = {seq, "AllReduce", buffer, buffer, count, 0, "ncclFloat32", (uint8_t)num_channels, 16,
                         "RING", "SIMPLE"};
  switch (p->version) {
  case 1:
    SEND(1, EV_COLL, group, rank,
         event.coll = ((struct coll_v1){"world", hash, seq, 4, buffer, buffer, count, 0, 7, 0, count * 4,
                                        (uint8_t)num_channels, 16, 1, 2, 0, 0}));
    break;
  case 2:
    SEND(2, EV_COLL, group, rank,
         event.coll = ((struct coll_v2){"world", hash, seq, "AllReduce", buffer, buffer, count, 0, "ncclFloat32",
                                        count * 4, (uint8_t)num_channels, 16, "RING", "SIMPLE"}));
    break;
  case 3:
    SEND(3, EV_COLL, group, rank,
         event.coll = ((struct coll_v3){"world", hash, seq, "AllReduce", buffer, buffer, count, 0, "ncclFloat32",
                                        (uint8_t)num_channels, 16, "RING", "SIMPLE"}));
    break;
  case 4: SEND(4, EV_COLL, group, rank, event.coll = base); break;
  case 5: SEND(5, EV_COLL, api, rank, event.coll = ((struct coll_v5){base, group})); break;
  case 6: SEND(6, EV_COLL, api, rank, event.coll = ((struct coll_v5){base, group})); break;
  case 7:
    SEND(7, EV_COLL, api, rank, event.coll = ((struct coll_v7){{base, group}, "symk", true, 42}));
    break;
  }
  return counted(EV_COLL, handle);
}

void *play_p2p(struct player *p, void *context, void *api, void *group, uint64_t hash, int rank, int peer,
               size_t count, int is_send) {
  void *handle = GARBAGE;
  const char *func = is_send ? "Send" : "Recv";
  struct p2p_v2 old = {"world", hash, func, &tally, "ncclBfloat16", count, peer};
  struct p2p_v4 base = {func, &tally, "ncclBfloat16", count, peer, 2};
  switch (p->version) {
  case 1:
    SEND(1, EV_P2P, group, rank,
         event.p2p = ((struct p2p_v1){"world", hash, is_send ? 6 : 7, &tally, 9, count, peer}));
    break;
  case 2: SEND(2, EV_P2P, group, rank, event.p2p = old); break;
  case 3: SEND(3, EV_P2P, group, rank, event.p2p = old); break;
  case 4: SEND(4, EV_P2P, group, rank, event.p2p = base); break;
  case 5: SEND(5, EV_P2P, api, rank, event.p2p = ((struct p2p_v5){base, group})); break;
  case 6: SEND(6, EV_P2P, api, rank, event.p2p = ((struct p2p_v5){base, group})); break;
  case 7: SEND(7, EV_P2P, api, rank, event.p2p = ((struct p2p_v7){{base, group}, 43})); break;
  }
  return counted(EV_P2P, handle);
}

void *play_proxy_op(struct player *p, void *context, void *parent, int pid, int peer) {
  void *handle = GARBAGE;
#define DO(V) SEND(V, EV_PROXY_OP, parent, 0, event.op = ((struct proxy_op){pid, 3, peer, 8, 1 << 20, 1}))
  EACH(DO)
#undef DO
  return counted(EV_PROXY_OP, handle);
}

void *play_proxy_step(struct player *p, void *context, void *parent, int step) {
  void *handle = GARBAGE;
#define DO(V) SEND(V, EV_PROXY_STEP, parent, 0, event.step.step = step)
  EACH(DO)
#undef DO
  return counted(EV_PROXY_STEP, handle);
}

#define KERNEL_3 event.kernel.channel = (uint8_t)channel
#define KERNEL_4 event.kernel = ((struct kernel_ch_v4){(uint8_t)channel, gpu_ns})
#define KERNEL_5 KERNEL_4
#define KERNEL_6 KERNEL_4
#define KERNEL_7 KERNEL_4

void *play_kernel(struct player *p, void *context, void *parent, int channel, uint64_t gpu_ns) {
  void *handle = GARBAGE;
  if (p->version < 3) return NULL;
#define DO(V) SEND(V, EV_KERNEL_CH, parent, 0, KERNEL_##V)
  SINCE(3, DO)
#undef DO
  return counted(EV_KERNEL_CH, handle);
}

void *play_net(struct player *p, void *context, void *parent) {
  void *handle = GARBAGE;
  struct net_ib_v1 ib = {1, {2, 77, 0, 55, 4096}};
  if (p->version < 3) return NULL;
#define DO(V) SEND(V, EV_NET, parent, 0, event.net = ((struct net){NET_IB_V1, &ib}))
  SINCE(3, DO)
#undef DO
  return counted(EV_NET, handle);
}

void *play_ce_coll(struct player *p, void *context, void *api, uint64_t seq, size_t count) {
  void *handle = GARBAGE;
  struct ce_coll_v6 base = {seq, "AllGather", &tally, &tally, count, 0, "ncclInt8", "memops", true, 1, 1, 1, NULL};
  if (p->version == 6) SEND(6, EV_CE_COLL, api, 0, event.ce_coll = base)
  else if (p->version == 7) SEND(7, EV_CE_COLL, api, 0, event.ce_coll = ((struct ce_coll_v7){base, 44}))
  else return NULL;
  return counted(EV_CE_COLL, handle);
}

void *play_phase(struct player *p, void *context, void *kernel, int channel, uint64_t gpu_ns) {
  void *handle = GARBAGE;
  if (p->version < 7) return NULL;
  SEND(7, EV_KERNEL_PHASE, kernel, 0,
       event.phase = ((struct kernel_phase){(uint8_t)channel, 1, "compute", gpu_ns}));
  return counted(EV_KERNEL_PHASE, handle);
}

void play_unknown(struct player *p, void *context) {
  void *handle = GARBAGE;
#define DO(V) SEND(V, 7, NULL, 0, event.type = (V) < 5 ? 0x81 : 0x4000001)
  EACH(DO)
#undef DO
  if (handle != NULL) atomic_fetch_add(&tally.errors, 1);
}

void play_state(struct player *p, void *handle, int state, uint64_t value) {
  if (p->version < 4) {
    union state_v1 old = {.op = {value, 1}};
    check(((struct table_v1 *)p->table)->record_state(handle, state, &old));
  } else {
    union state_v4 new = {.gpu_ns = value};
    check(((struct table_v4 *)p->table)->record_state(handle, state, value ? &new : NULL));
  }
  if (handle) atomic_fetch_add_explicit(&tally.states, 1, memory_order_relaxed);
}

void play_stop(struct player *p, void *handle) {
  check(((struct table_v1 *)p->table)->stop(handle)); /* at the same place in every version */
  if (handle) atomic_fetch_add_explicit(&tally.stopped, 1, memory_order_relaxed);
}
