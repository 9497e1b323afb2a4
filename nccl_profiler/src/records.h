/* The layout of a record file (spec/nccl-records.md): structures and numbers only.
 *
 * Everything is little-endian and a multiple of 32 bytes; the file is a header and then blocks.
 */
#ifndef PRISM_NCCL_RECORDS_H
#define PRISM_NCCL_RECORDS_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "record files are little-endian: this machine would have to swap bytes"
#endif

#define FILE_MAGIC "\x8ePrNccl\n"
enum { FILE_VERSION = 1, MAX_TEXT = 56, MAX_COMM_NAME = 96, MAX_HOST = 64, ABSENT_RANK = -1 };
#define ABSENT_NS INT64_MIN
#define ABSENT_SEQ INT64_MIN
#define BLOCK_MARKER 0x4B4C4250u /* "PBLK" */

struct file_header { /* 192 bytes */
  char magic[8];
  uint32_t version, header_bytes;
  int32_t pid, rank, local_rank, world_size; /* rank... from the environment; -1 where it does not say */
  int64_t monotonic_ns, realtime_ns;         /* read together */
  uint32_t event_mask, sample_every;
  uint32_t record_bytes, reserved;
  char host[MAX_HOST];
  char boot_id[40]; /* equal for processes whose monotonic clocks are one */
  uint8_t padding[24];
};

enum block_kind {
  BLOCK_RECORDS = 1, BLOCK_STRINGS = 2, BLOCK_COMMS = 3, BLOCK_CLOCK = 4, BLOCK_COUNTERS = 5, BLOCK_END = 6
};

struct block_header { /* 32 bytes */
  uint32_t marker;
  uint16_t kind, ring;
  uint32_t num_bytes; /* of what follows */
  int32_t thread_id;
  uint64_t checksum; /* of what follows */
  uint64_t header_checksum; /* of the 24 bytes before it */
};

enum record_kind { REC_START = 1, REC_STOP = 2, REC_STATE = 3, REC_TASK = 4, REC_MORE = 5 };

struct rec_start { uint8_t kind, type, a, b; uint16_t c, comm; uint64_t id; int64_t time_ns; uint64_t parent; };
struct rec_stop { uint8_t kind, type; uint16_t reserved; uint32_t reserved2; uint64_t id; int64_t time_ns;
                  uint64_t reserved3; };
struct rec_state { uint8_t kind, type, state, reserved; uint32_t reserved2; uint64_t id; int64_t time_ns;
                   uint64_t value; };
struct rec_task { uint8_t kind, func, dtype, algo, proto, channels, warps, flags; uint64_t count; int64_t seq;
                  int32_t root; uint8_t variant, version; uint16_t reserved; };
struct rec_more { uint8_t kind, type; uint16_t reserved; uint32_t reserved2; uint64_t value[3]; };

union record {
  struct rec_start start; struct rec_stop stop; struct rec_state state; struct rec_task task; struct rec_more more;
};

enum { FLAG_CAPTURED = 1, FLAG_IN_PLACE = 2, FLAG_SYMMETRIC = 4, FLAG_COLLNET = 8, FLAG_NVLS = 16 };

struct string_entry { uint32_t code, length; char text[MAX_TEXT]; }; /* 64 bytes */

struct comm_entry { /* 192 bytes; a later entry of the same number replaces an earlier one */
  uint32_t number;
  int32_t rank, num_ranks, num_nodes;
  uint64_t hash; /* 0 while unknown */
  int64_t created_ns, destroyed_ns;
  int32_t device, interface_version;
  int32_t thread_id, name_bytes;
  uint8_t device_uuid[16];
  char name[MAX_COMM_NAME];
  uint8_t padding[24];
};

struct clock_entry { int64_t monotonic_ns, realtime_ns; uint64_t reserved[2]; };

struct counter_entry { /* totals since the start; 64 bytes */
  uint16_t ring, reserved; uint32_t reserved2;
  uint64_t num_records, lost_starts, lost_stops, lost_states, no_ring, sampled_out, orphans;
};

struct end_entry { int64_t monotonic_ns; uint32_t reason, reserved; uint64_t lost_bytes, reserved2; };
enum end_reason { END_EXIT = 1, END_SIGNAL = 2 };

_Static_assert(sizeof(struct file_header) == 192, "file header");
_Static_assert(sizeof(struct block_header) == 32, "block header");
_Static_assert(sizeof(union record) == 32, "record");
_Static_assert(sizeof(struct string_entry) == 64, "string entry");
_Static_assert(sizeof(struct comm_entry) == 192, "communicator entry");
_Static_assert(sizeof(struct clock_entry) == 32, "clock entry");
_Static_assert(sizeof(struct counter_entry) == 64, "counter entry");
_Static_assert(sizeof(struct end_entry) == 32, "end entry");

#endif
