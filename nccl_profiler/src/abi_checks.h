/* Holds every size and offset that NCCL's profiler interface fixes against the declarations of abi.h (64-bit). */
#ifndef PRISM_NCCL_ABI_CHECKS_H
#define PRISM_NCCL_ABI_CHECKS_H

#define AT(DESCR, MEMBER, OFFSET) \
  _Static_assert(offsetof(struct DESCR, MEMBER) == (OFFSET), #DESCR "." #MEMBER " is not at byte " #OFFSET)
#define SIZE(WHAT, BYTES) _Static_assert(sizeof(WHAT) == (BYTES), #WHAT " has not " #BYTES " bytes")

#define HEAD(DESCR) AT(DESCR, type, 0); AT(DESCR, parent, 8); AT(DESCR, rank, 16)
HEAD(descr_v1); HEAD(descr_v2); HEAD(descr_v3); HEAD(descr_v4); HEAD(descr_v5); HEAD(descr_v6); HEAD(descr_v7);

SIZE(struct descr_v1, 120);
SIZE(struct descr_v2, 128);
SIZE(struct descr_v3, 120);
SIZE(struct descr_v4, 104);
SIZE(struct descr_v5, 112);
SIZE(struct descr_v6, 112);
SIZE(struct descr_v7, 136);
SIZE(union state_v1, 16);
SIZE(union state_v4, 8);
SIZE(struct table_v1, 48); SIZE(struct table_v2, 48); SIZE(struct table_v3, 48); SIZE(struct table_v4, 48);
SIZE(struct table_v5, 48); SIZE(struct table_v6, 48); SIZE(struct table_v7, 48);
AT(table_v7, init, 8); AT(table_v7, start, 16); AT(table_v7, stop, 24); AT(table_v7, record_state, 32);
AT(table_v7, finalize, 40);

AT(descr_v1, coll.comm_name, 24); AT(descr_v1, coll.comm_hash, 32); AT(descr_v1, coll.seq, 40);
AT(descr_v1, coll.func, 48); AT(descr_v1, coll.send, 56); AT(descr_v1, coll.recv, 64); AT(descr_v1, coll.count, 72);
AT(descr_v1, coll.root, 80); AT(descr_v1, coll.dtype, 84); AT(descr_v1, coll.reduce_op, 88);
AT(descr_v1, coll.traffic_bytes, 96); AT(descr_v1, coll.channels, 104); AT(descr_v1, coll.warps, 105);
AT(descr_v1, coll.algo, 106); AT(descr_v1, coll.proto, 107); AT(descr_v1, coll.is_collnet, 108);
AT(descr_v1, coll.is_nvls, 112);
AT(descr_v1, p2p.func, 40); AT(descr_v1, p2p.buffer, 48); AT(descr_v1, p2p.dtype, 56); AT(descr_v1, p2p.count, 64);
AT(descr_v1, p2p.peer, 72);

#define COLL_V2(DESCR)                                                                                    \
  AT(DESCR, coll.comm_name, 24); AT(DESCR, coll.comm_hash, 32); AT(DESCR, coll.seq, 40); AT(DESCR, coll.func, 48); \
  AT(DESCR, coll.send, 56); AT(DESCR, coll.recv, 64); AT(DESCR, coll.count, 72); AT(DESCR, coll.root, 80);         \
  AT(DESCR, coll.dtype, 88); AT(DESCR, p2p.comm_name, 24); AT(DESCR, p2p.comm_hash, 32); AT(DESCR, p2p.func, 40);  \
  AT(DESCR, p2p.buffer, 48); AT(DESCR, p2p.dtype, 56); AT(DESCR, p2p.count, 64); AT(DESCR, p2p.peer, 72)
COLL_V2(descr_v2);
AT(descr_v2, coll.traffic_bytes, 96); AT(descr_v2, coll.channels, 104); AT(descr_v2, coll.warps, 105);
AT(descr_v2, coll.algo, 112); AT(descr_v2, coll.proto, 120);
COLL_V2(descr_v3);
AT(descr_v3, coll.channels, 96); AT(descr_v3, coll.warps, 97); AT(descr_v3, coll.algo, 104);
AT(descr_v3, coll.proto, 112);

#define COLL_V4(DESCR, C, P)                                                                                       \
  AT(DESCR, C.seq, 24); AT(DESCR, C.func, 32); AT(DESCR, C.send, 40); AT(DESCR, C.recv, 48); AT(DESCR, C.count, 56); \
  AT(DESCR, C.root, 64); AT(DESCR, C.dtype, 72); AT(DESCR, C.channels, 80); AT(DESCR, C.warps, 81);                \
  AT(DESCR, C.algo, 88); AT(DESCR, C.proto, 96);                                                                   \
  AT(DESCR, P.func, 24); AT(DESCR, P.buffer, 32); AT(DESCR, P.dtype, 40); AT(DESCR, P.count, 48);                  \
  AT(DESCR, P.peer, 56); AT(DESCR, P.channels, 60)
COLL_V4(descr_v4, coll, p2p);
COLL_V4(descr_v5, coll.base, p2p.base);
COLL_V4(descr_v6, coll.base, p2p.base);
COLL_V4(descr_v7, coll.base.base, p2p.base.base);
AT(descr_v5, coll.group, 104); AT(descr_v5, p2p.group, 64); AT(descr_v6, coll.group, 104); AT(descr_v6, p2p.group, 64);
AT(descr_v7, coll.base.group, 104); AT(descr_v7, p2p.base.group, 64);
AT(descr_v7, coll.variant, 112); AT(descr_v7, coll.is_symmetric, 120); AT(descr_v7, coll.user_tag, 128);
AT(descr_v7, p2p.user_tag, 72);

#define PROXY(DESCR)                                                                                   \
  AT(DESCR, op.pid, 24); AT(DESCR, op.channel, 28); AT(DESCR, op.peer, 32); AT(DESCR, op.num_steps, 36); \
  AT(DESCR, op.chunk_bytes, 40); AT(DESCR, op.is_send, 44); AT(DESCR, step.step, 24)
PROXY(descr_v1); PROXY(descr_v2); PROXY(descr_v3); PROXY(descr_v4); PROXY(descr_v5); PROXY(descr_v6); PROXY(descr_v7);

#define NET(DESCR) AT(DESCR, net.id, 24); AT(DESCR, net.data, 32); AT(DESCR, kernel.channel, 24)
NET(descr_v3); NET(descr_v4); NET(descr_v5); NET(descr_v6); NET(descr_v7);
AT(descr_v4, kernel.gpu_ns, 32); AT(descr_v5, kernel.gpu_ns, 32); AT(descr_v6, kernel.gpu_ns, 32);
AT(descr_v7, kernel.gpu_ns, 32);

#define API(DESCR, C, P)                                                                                       \
  AT(DESCR, group_api.is_captured, 24); AT(DESCR, group_api.depth, 28); AT(DESCR, launch.stream, 24);          \
  AT(DESCR, C.func, 24); AT(DESCR, C.count, 32); AT(DESCR, C.dtype, 40); AT(DESCR, C.root, 48);                \
  AT(DESCR, C.stream, 56); AT(DESCR, C.is_captured, 64);                                                       \
  AT(DESCR, P.func, 24); AT(DESCR, P.count, 32); AT(DESCR, P.dtype, 40); AT(DESCR, P.stream, 48);              \
  AT(DESCR, P.is_captured, 56)
API(descr_v5, coll_api, p2p_api);
API(descr_v6, coll_api, p2p_api);
API(descr_v7, coll_api.base, p2p_api.base);
AT(descr_v7, coll_api.user_tag, 72); AT(descr_v7, p2p_api.user_tag, 64);

#define COPY_ENGINE(DESCR, C)                                                                                        \
  AT(DESCR, C.seq, 24); AT(DESCR, C.func, 32); AT(DESCR, C.send, 40); AT(DESCR, C.recv, 48); AT(DESCR, C.count, 56); \
  AT(DESCR, C.root, 64); AT(DESCR, C.dtype, 72); AT(DESCR, C.sync, 80); AT(DESCR, C.intra_batch_sync, 88);           \
  AT(DESCR, C.batch_size, 92); AT(DESCR, C.num_batches, 96); AT(DESCR, C.ce_seq, 100); AT(DESCR, C.stream, 104);     \
  AT(DESCR, ce_sync.is_complete, 24); AT(DESCR, ce_sync.num_ranks, 28); AT(DESCR, ce_batch.num_ops, 24);             \
  AT(DESCR, ce_batch.num_bytes, 32); AT(DESCR, ce_batch.use_intra_sync, 40)
COPY_ENGINE(descr_v6, ce_coll);
COPY_ENGINE(descr_v7, ce_coll.base);
AT(descr_v7, ce_coll.user_tag, 112);
AT(descr_v7, phase.channel, 24); AT(descr_v7, phase.phase, 25); AT(descr_v7, phase.name, 32);
AT(descr_v7, phase.gpu_ns, 40);
AT(net_ib_v1, qp.device, 8); AT(net_ib_v1, qp.work_id, 16); AT(net_ib_v1, qp.opcode, 24); AT(net_ib_v1, qp.queue_pair, 28);
AT(net_ib_v1, qp.num_bytes, 32);

#endif
