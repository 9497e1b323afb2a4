/* From a descriptor of any version to records: what the shims of all versions share. Inline, for the hot path only. */
#ifndef PRISM_NCCL_EVENTS_H
#define PRISM_NCCL_EVENTS_H

#include "core.h"

/* One event being written: its ring, how many records it takes, its id. */
struct writing { struct ring *ring; uint64_t id; };

#define NEEDS_PARENT                                                                                        \
  ((1u << EV_PROXY_OP) | (1u << EV_PROXY_STEP) | (1u << EV_KERNEL_CH) | (1u << EV_NET) | (1u << EV_CE_SYNC) | \
   (1u << EV_CE_BATCH) | (1u << EV_KERNEL_PHASE))

/* Begins an event of `num` records: the first is stored here, the caller stores the others and calls `finish`.
 * False: there is nothing to store, and the handle stays NULL. */
static inline bool begin(struct writing *w, struct comm *comm, unsigned type, const void *parent, unsigned num,
                         uint8_t a, uint8_t b, uint16_t c) {
  if (UNLIKELY(comm == NULL || !atomic_load_explicit(&prism.active, memory_order_relaxed))) return false;
  if (!(prism.event_mask >> type & 1)) return false;
  int64_t now = now_ns();
  struct ring *ring = w->ring = my_ring();
  if (UNLIKELY(ring == NULL)) return false;
  if (UNLIKELY(parent == NULL && (NEEDS_PARENT >> type & 1) && !(type == EV_PROXY_OP && (b & 2)))) {
    count(&ring->orphans); /* the parent was lost or left out, and so is this */
    return false;
  }
  if (UNLIKELY(!ring_fits(ring, num))) {
    count(&ring->lost_starts);
    return false;
  }
  w->id = ++ring->num_events << 12 | (uint64_t)ring->index << 4 | type;
  struct rec_start *start = &record_at(ring, 0)->start;
  start->kind = REC_START;
  start->type = (uint8_t)type;
  start->a = a;
  start->b = b;
  start->c = c;
  start->comm = (uint16_t)comm->entry.number;
  start->id = w->id;
  start->time_ns = now;
  start->parent = (uint64_t)(uintptr_t)parent;
  return true;
}

static inline void more(struct writing *w, unsigned place, unsigned type, uint64_t x, uint64_t y, uint64_t z) {
  struct rec_more *record = &record_at(w->ring, place)->more;
  record->kind = REC_MORE;
  record->type = (uint8_t)type;
  record->reserved = 0;
  record->reserved2 = 0;
  record->value[0] = x;
  record->value[1] = y;
  record->value[2] = z;
}

static inline void finish(struct writing *w, unsigned num, void **handle) {
  ring_publish(w->ring, num);
  *handle = (void *)(uintptr_t)w->id;
}

struct task {
  const char *func, *dtype, *algo, *proto, *variant;
  uint64_t count, user_tag;
  int64_t seq;
  const void *group, *stream;
  int root;
  uint8_t channels, warps, flags;
};

/* A collective, a message, or the call of one: three records. */
static inline void write_task(struct comm *comm, unsigned type, const void *parent, const struct task *task,
                              void **handle) {
  struct writing w;
  if (!begin(&w, comm, type, parent, 3, 0, 0, 0)) return;
  struct rec_task *record = &record_at(w.ring, 1)->task;
  record->kind = REC_TASK;
  record->func = string_code(w.ring, task->func);
  record->dtype = string_code(w.ring, task->dtype);
  record->algo = string_code(w.ring, task->algo);
  record->proto = string_code(w.ring, task->proto);
  record->channels = task->channels;
  record->warps = task->warps;
  record->flags = task->flags;
  record->count = task->count;
  record->seq = task->seq;
  record->root = task->root;
  record->variant = string_code(w.ring, task->variant);
  record->version = (uint8_t)comm->entry.interface_version;
  record->reserved = 0;
  more(&w, 2, type, (uint64_t)(uintptr_t)task->group, task->user_tag, (uint64_t)(uintptr_t)task->stream);
  finish(&w, 3, handle);
}

/* Whether sampling leaves a collective out; by its number, so that all ranks leave out the same. */
static inline bool leaves_out(struct comm *comm, uint64_t seq) {
  if (LIKELY(prism.sample_every <= 1 || comm == NULL)) return false;
  if (seq % prism.sample_every == 0) return false;
  struct ring *ring = atomic_load_explicit(&prism.active, memory_order_relaxed) ? my_ring() : NULL;
  if (ring) count(&ring->sampled_out);
  return true;
}

static inline bool leaves_out_message(struct comm *comm) {
  if (LIKELY(prism.sample_every <= 1 || comm == NULL)) return false;
  return leaves_out(comm, atomic_fetch_add_explicit(&comm->num_messages, 1, memory_order_relaxed));
}

static inline void write_proxy_op(struct comm *comm, const void *parent, const struct proxy_op *op, void **handle) {
  bool is_foreign = op->pid != prism.pid; /* another process's operation: its parent is an address over there */
  struct writing w;
  if (!begin(&w, comm, EV_PROXY_OP, is_foreign ? NULL : parent, 2, op->channel,
             (uint8_t)((op->is_send != 0) | is_foreign << 1), 0))
    return;
  more(&w, 1, EV_PROXY_OP, (uint32_t)op->pid, (uint32_t)op->peer | (uint64_t)(uint32_t)op->num_steps << 32,
       (uint32_t)op->chunk_bytes);
  finish(&w, 2, handle);
}

static inline void write_net(struct comm *comm, const void *parent, const struct net *net, void **handle) {
  struct writing w;
  if (!begin(&w, comm, EV_NET, parent, 2, 0, 0, 0)) return;
  uint64_t where = 0, num_bytes = 0;
  if (net->id == NET_IB_V1 && net->data) {
    const struct net_ib_v1 *ib = net->data;
    where = (uint32_t)ib->qp.device | (uint64_t)(uint32_t)ib->qp.queue_pair << 32;
    num_bytes = ib->qp.num_bytes;
  }
  more(&w, 1, EV_NET, (uint64_t)net->id, where, num_bytes);
  finish(&w, 2, handle);
}

/* An event of one record, or of two with a few numbers. */
static inline void write_plain(struct comm *comm, unsigned type, const void *parent, uint8_t a, uint8_t b, uint16_t c,
                               void **handle) {
  struct writing w;
  if (begin(&w, comm, type, parent, 1, a, b, c)) finish(&w, 1, handle);
}

static inline void write_numbers(struct comm *comm, unsigned type, const void *parent, uint8_t a, uint8_t b,
                                 uint64_t x, uint64_t y, void **handle) {
  struct writing w;
  if (!begin(&w, comm, type, parent, 2, a, b, 0)) return;
  more(&w, 1, type, x, y, 0);
  finish(&w, 2, handle);
}

static inline abi_result stop_event(void *handle) {
  if (handle == NULL || !atomic_load_explicit(&prism.active, memory_order_relaxed)) return ABI_SUCCESS;
  struct ring *ring = my_ring();
  if (UNLIKELY(ring == NULL)) return ABI_SUCCESS;
  uint64_t id = (uint64_t)(uintptr_t)handle;
  if (ring->ended == id) { /* a kernel channel: NCCL tells its GPU time, and stops it at once */
    ring->ended = 0;
    return ABI_SUCCESS;
  }
  int64_t now = now_ns();
  if (UNLIKELY(!ring_fits(ring, 1))) {
    count(&ring->lost_stops);
    return ABI_SUCCESS;
  }
  record_at(ring, 0)->stop =
      (struct rec_stop){.kind = REC_STOP, .type = (uint8_t)ID_TYPE(id), .id = id, .time_ns = now};
  ring_publish(ring, 1);
  return ABI_SUCCESS;
}

static inline abi_result record_state(void *handle, int state, uint64_t value) {
  if (handle == NULL || !atomic_load_explicit(&prism.active, memory_order_relaxed)) return ABI_SUCCESS;
  int64_t now = now_ns();
  struct ring *ring = my_ring();
  if (UNLIKELY(ring == NULL)) return ABI_SUCCESS;
  if (UNLIKELY(!ring_fits(ring, 1))) {
    count(&ring->lost_states);
    return ABI_SUCCESS;
  }
  uint64_t id = (uint64_t)(uintptr_t)handle;
  record_at(ring, 0)->state = (struct rec_state){
      .kind = REC_STATE, .type = (uint8_t)ID_TYPE(id), .state = (uint8_t)state, .id = id, .time_ns = now,
      .value = value};
  if (state == ST_KERNEL_CH_STOP || state == ST_KERNEL_PHASE_STOP) ring->ended = id;
  ring_publish(ring, 1);
  return ABI_SUCCESS;
}

static inline abi_result finalize(void *context) {
  if (context) comm_destroy(context);
  return ABI_SUCCESS;
}

#endif
