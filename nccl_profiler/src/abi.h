/* What NCCL hands to a profiler plugin, versions 1 to 7 of its interface: layouts only, no behaviour.
 *
 * These are declarations of our own. NCCL ships no header for this interface, so every size and offset that the
 * interface fixes is asserted below, and a compiler that lays a structure out differently refuses to build.
 * Members that this library does not read are kept only where they hold a place.
 */
#ifndef PRISM_NCCL_ABI_H
#define PRISM_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ABI_SUCCESS = 0 };                 /* ncclSuccess: the only result that this library ever gives */
enum { ABI_LOG_WARN = 2, ABI_LOG_INFO = 3 };
enum { ABI_LOG_PROFILE = 0x4000 };

/* Event types as bit numbers; the interface uses 1 << number. */
enum event_type {
  EV_GROUP = 0, EV_COLL = 1, EV_P2P = 2, EV_PROXY_OP = 3, EV_PROXY_STEP = 4, EV_PROXY_CTRL = 5,
  EV_KERNEL_CH = 6, EV_NET = 7,                                             /* version 3 */
  EV_GROUP_API = 8, EV_COLL_API = 9, EV_P2P_API = 10, EV_KERNEL_LAUNCH = 11, /* version 5 */
  EV_CE_COLL = 12, EV_CE_SYNC = 13, EV_CE_BATCH = 14,                       /* version 6 */
  EV_KERNEL_PHASE = 15,                                                     /* version 7 */
  EV_NUM = 16
};

/* States that carry something this library reads. */
enum {
  ST_PROXY_CTRL_APPEND_END = 18, ST_NET_UPDATE = 21, ST_KERNEL_CH_STOP = 22, ST_KERNEL_PHASE_STOP = 31
};

typedef int abi_result;
typedef void (*abi_logger)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

/* ---- collectives ------------------------------------------------------------------------------------------------ */

struct coll_v1 {
  const char *comm_name; uint64_t comm_hash; uint64_t seq; uint8_t func; const void *send; void *recv; size_t count;
  int root; uint8_t dtype; uint32_t reduce_op; size_t traffic_bytes; uint8_t channels, warps, algo, proto;
  int is_collnet, is_nvls;
};
struct coll_v2 {
  const char *comm_name; uint64_t comm_hash; uint64_t seq; const char *func; const void *send; void *recv;
  size_t count; int root; const char *dtype; size_t traffic_bytes; uint8_t channels, warps; const char *algo, *proto;
};
struct coll_v3 {
  const char *comm_name; uint64_t comm_hash; uint64_t seq; const char *func; const void *send; void *recv;
  size_t count; int root; const char *dtype; uint8_t channels, warps; const char *algo, *proto;
};
struct coll_v4 {
  uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *dtype;
  uint8_t channels, warps; const char *algo, *proto;
};
struct coll_v5 { struct coll_v4 base; void *group; };
struct coll_v7 { struct coll_v5 base; const char *variant; bool is_symmetric; uint64_t user_tag; };

/* ---- messages --------------------------------------------------------------------------------------------------- */

struct p2p_v1 {
  const char *comm_name; uint64_t comm_hash; uint8_t func; void *buffer; uint8_t dtype; size_t count; int peer;
};
struct p2p_v2 {
  const char *comm_name; uint64_t comm_hash; const char *func; void *buffer; const char *dtype; size_t count; int peer;
};
struct p2p_v4 {
  const char *func; void *buffer; const char *dtype; size_t count; int peer; uint8_t channels;
};
struct p2p_v5 { struct p2p_v4 base; void *group; };
struct p2p_v7 { struct p2p_v5 base; uint64_t user_tag; };

/* ---- everything else --------------------------------------------------------------------------------------------- */

struct proxy_op { int32_t pid; uint8_t channel; int peer, num_steps, chunk_bytes, is_send; };
struct proxy_step { int step; };
struct kernel_ch_v3 { uint8_t channel; };
struct kernel_ch_v4 { uint8_t channel; uint64_t gpu_ns; };
struct net { int64_t id; void *data; };
struct group_api { bool is_captured; int depth; };
struct coll_api_v5 { const char *func; size_t count; const char *dtype; int root; void *stream; bool is_captured; };
struct coll_api_v7 { struct coll_api_v5 base; uint64_t user_tag; };
struct p2p_api_v5 { const char *func; size_t count; const char *dtype; void *stream; bool is_captured; };
struct p2p_api_v7 { struct p2p_api_v5 base; uint64_t user_tag; };
struct kernel_launch { void *stream; };
struct ce_coll_v6 {
  uint64_t seq; const char *func; const void *send; void *recv; size_t count; int root; const char *dtype;
  const char *sync; bool intra_batch_sync; uint32_t batch_size, num_batches, ce_seq; void *stream;
};
struct ce_coll_v7 { struct ce_coll_v6 base; uint64_t user_tag; };
struct ce_sync { bool is_complete; int num_ranks; };
struct ce_batch { int num_ops; size_t num_bytes; bool use_intra_sync; };
struct kernel_phase { uint8_t channel, phase; const char *name; uint64_t gpu_ns; };

/* What `net.data` points to for an event of NCCL's own InfiniBand transport, version 1. */
enum { NET_IB_V1 = (1 << 16) | 1 };
struct net_ib_qp { int device; uint64_t work_id; int opcode, queue_pair; size_t num_bytes; };
struct net_ib_v1 { uint8_t type; struct net_ib_qp qp; };

/* ---- descriptors: type, parent, rank, and one of the above ------------------------------------------------------- */

#define DESCRIPTOR(NAME, TYPE, ...) \
  struct NAME { TYPE type; void *parent; int rank; union { __VA_ARGS__ }; }

DESCRIPTOR(descr_v1, uint8_t, struct coll_v1 coll; struct p2p_v1 p2p; struct proxy_op op; struct proxy_step step;);
DESCRIPTOR(descr_v2, uint8_t, struct coll_v2 coll; struct p2p_v2 p2p; struct proxy_op op; struct proxy_step step;);
DESCRIPTOR(descr_v3, uint8_t, struct coll_v3 coll; struct p2p_v2 p2p; struct proxy_op op; struct proxy_step step;
           struct kernel_ch_v3 kernel; struct net net;);
DESCRIPTOR(descr_v4, uint8_t, struct coll_v4 coll; struct p2p_v4 p2p; struct proxy_op op; struct proxy_step step;
           struct kernel_ch_v4 kernel; struct net net;);
DESCRIPTOR(descr_v5, uint64_t, struct coll_v5 coll; struct p2p_v5 p2p; struct proxy_op op; struct proxy_step step;
           struct kernel_ch_v4 kernel; struct net net; struct group_api group_api; struct coll_api_v5 coll_api;
           struct p2p_api_v5 p2p_api; struct kernel_launch launch;);
DESCRIPTOR(descr_v6, uint64_t, struct coll_v5 coll; struct p2p_v5 p2p; struct proxy_op op; struct proxy_step step;
           struct kernel_ch_v4 kernel; struct net net; struct group_api group_api; struct coll_api_v5 coll_api;
           struct p2p_api_v5 p2p_api; struct kernel_launch launch; struct ce_coll_v6 ce_coll; struct ce_sync ce_sync;
           struct ce_batch ce_batch;);
DESCRIPTOR(descr_v7, uint64_t, struct coll_v7 coll; struct p2p_v7 p2p; struct proxy_op op; struct proxy_step step;
           struct kernel_ch_v4 kernel; struct net net; struct group_api group_api; struct coll_api_v7 coll_api;
           struct p2p_api_v7 p2p_api; struct kernel_launch launch; struct ce_coll_v7 ce_coll; struct ce_sync ce_sync;
           struct ce_batch ce_batch; struct kernel_phase phase;);

/* What a change of state hands over: 16 bytes up to version 3, 8 bytes since. */
union state_v1 {
  struct { size_t num_bytes; int num_steps; } op;
  struct { int num_appended; } ctrl;
};
union state_v4 { uint64_t gpu_ns; size_t num_bytes; int num_appended; void *data; };

/* ---- tables ------------------------------------------------------------------------------------------------------ */

#define TABLE(NAME, INIT, DESCR, STATE)                                  \
  struct NAME {                                                          \
    const char *name;                                                    \
    abi_result (*init) INIT;                                             \
    abi_result (*start)(void *context, void **handle, struct DESCR *event); \
    abi_result (*stop)(void *handle);                                    \
    abi_result (*record_state)(void *handle, int state, union STATE *arguments); \
    abi_result (*finalize)(void *context);                               \
  }

#define INIT_V1 (void **context, int *mask)
#define INIT_V4                                                                                              \
  (void **context, int *mask, const char *comm_name, uint64_t comm_hash, int num_nodes, int num_ranks, int rank, \
   abi_logger logger)
#define INIT_V5                                                                                              \
  (void **context, uint64_t comm_hash, int *mask, const char *comm_name, int num_nodes, int num_ranks, int rank, \
   abi_logger logger)

TABLE(table_v1, INIT_V1, descr_v1, state_v1);
TABLE(table_v2, INIT_V1, descr_v2, state_v1);
TABLE(table_v3, INIT_V1, descr_v3, state_v1);
TABLE(table_v4, INIT_V4, descr_v4, state_v4);
TABLE(table_v5, INIT_V5, descr_v5, state_v4);
TABLE(table_v6, INIT_V5, descr_v6, state_v4);
TABLE(table_v7, INIT_V5, descr_v7, state_v4);

#include "abi_checks.h"

#endif
