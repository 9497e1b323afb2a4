/* The calls that NCCL makes to a profiler, for each version of the interface behind one set of functions.
 *
 * It builds descriptors as NCCL does and counts what it did; what is played is decided by host.c.
 */
#ifndef PLAYS_NCCL_H
#define PLAYS_NCCL_H

#include "../src/abi.h"

#include <stdatomic.h>

struct tally { _Atomic long started[EV_NUM], refused[EV_NUM], stopped, states, errors; };
extern struct tally tally;

struct player {
  int version;
  void *table; /* struct table_vN */
};

void *play_init(struct player *p, uint64_t hash, const char *name, int num_ranks, int rank, int *mask);
void play_finalize(struct player *p, void *context);
void *play_group_api(struct player *p, void *context);
void *play_coll_api(struct player *p, void *context, void *parent, const char *func, size_t count, const char *dtype);
void *play_p2p_api(struct player *p, void *context, void *parent, const char *func, size_t count, const char *dtype);
void *play_launch(struct player *p, void *context, void *parent);
void *play_group(struct player *p, void *context);
void *play_coll(struct player *p, void *context, void *api, void *group, uint64_t hash, int rank, uint64_t seq,
                size_t count, int num_channels);
void *play_p2p(struct player *p, void *context, void *api, void *group, uint64_t hash, int rank, int peer,
               size_t count, int is_send);
void *play_proxy_op(struct player *p, void *context, void *parent, int pid, int peer);
void *play_proxy_step(struct player *p, void *context, void *parent, int step);
void *play_kernel(struct player *p, void *context, void *parent, int channel, uint64_t gpu_ns);
void *play_net(struct player *p, void *context, void *parent);
void *play_ce_coll(struct player *p, void *context, void *api, uint64_t seq, size_t count);
void *play_phase(struct player *p, void *context, void *kernel, int channel, uint64_t gpu_ns);
void play_unknown(struct player *p, void *context);
void play_state(struct player *p, void *handle, int state, uint64_t value);
void play_stop(struct player *p, void *handle);

#endif
