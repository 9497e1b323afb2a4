/* What the parts of the library share: the driver's functions as far as they are used, the table of pages, the moves.
 *
 * The declarations are our own, after the documented ABI of the CUDA driver, so that a C compiler alone is needed.
 */
#ifndef PRISM_PAGES_H
#define PRISM_PAGES_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle; /* CUmemGenericAllocationHandle */
typedef void *CUcontext;
typedef void *CUstream;
typedef void *CUevent;

enum { CUDA_OK = 0, CUDA_OUT_OF_MEMORY = 2 };

typedef struct {
    int type, id;
} Location;

typedef struct { /* CUmemAllocationProp_v1 */
    int type;
    int handle_types;
    Location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} AllocationProp;

typedef struct { /* CUmemAccessDesc_v1 */
    Location location;
    int flags;
} AccessDesc;

_Static_assert(sizeof(AllocationProp) == 32, "CUmemAllocationProp has 32 bytes");
_Static_assert(sizeof(AccessDesc) == 12, "CUmemAccessDesc has 12 bytes");

#define DRIVER_FUNCTIONS(X)                                                                                            \
    X(cuCtxGetCurrent, cuCtxGetCurrent, (CUcontext *))                                                                 \
    X(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext))                                                                   \
    X(cuCtxGetDevice, cuCtxGetDevice, (CUdevice *))                                                                    \
    X(cuCtxSynchronize, cuCtxSynchronize, (void))                                                                      \
    X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *, size_t *))                                                             \
    X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity, (size_t *, const AllocationProp *, int))           \
    X(cuMemAddressReserve, cuMemAddressReserve,                                                                        \
      (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                                                \
    X(cuMemAddressFree, cuMemAddressFree, (CUdeviceptr, size_t))                                                       \
    X(cuMemCreate, cuMemCreate, (CUhandle *, size_t, const AllocationProp *, unsigned long long))                      \
    X(cuMemRelease, cuMemRelease, (CUhandle))                                                                          \
    X(cuMemMap, cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                                 \
    X(cuMemUnmap, cuMemUnmap, (CUdeviceptr, size_t))                                                                   \
    X(cuMemSetAccess, cuMemSetAccess, (CUdeviceptr, size_t, const AccessDesc *, size_t))                               \
    X(cuMemHostAlloc, cuMemHostAlloc, (void **, size_t, unsigned))                                                     \
    X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream))                                \
    X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream))                          \
    X(cuStreamCreate, cuStreamCreate, (CUstream *, unsigned))                                                          \
    X(cuStreamSynchronize, cuStreamSynchronize, (CUstream))

typedef struct {
#define FIELD(name, symbol, arguments) CUresult(*name) arguments;
    DRIVER_FUNCTIONS(FIELD)
#undef FIELD
} Driver;

typedef struct { /* one allocation of the program */
    CUdeviceptr address;
    size_t size; /* of the memory behind it, a multiple of the granularity; of one that is not movable as asked for */
    CUhandle handle;
    int movable; /* else it is the runtime's own, and stays where it is */
} Page;

enum { RESIDENT = 0, IN_HOST_MEMORY = 1, ON_DISK = 2 };

/* How a move ended. */
enum {
    DONE = 0,
    NO_DEVICE_MEMORY = 1, /* num_bytes says how much is missing; nothing has changed */
    NO_HOST_MEMORY = 2,
    NO_DISK = 3,
    DRIVER_ERROR = 4, /* code says which; what was on the device may be lost */
    NOT_NOW = 5,      /* the program has threads of its own that may use the memory */
};

typedef struct {
    uint32_t status, code;
    uint64_t num_bytes; /* moved */
    uint64_t copy_ns, total_ns;
    uint64_t fresh_bytes; /* of host memory that the system handed out for it */
} Moved;

typedef struct {
    uint64_t movable_bytes, fixed_bytes; /* the program's, on the device or not */
    uint64_t overhead_bytes;             /* context and libraries, as far as known */
    uint64_t limit_bytes;                /* 0: none */
    uint64_t refused_bytes;              /* size of the last allocation that was refused; 0: none was */
    uint64_t num_pages, where;
} Stats;

typedef struct {
    pthread_mutex_t lock;      /* of everything below */
    pthread_cond_t came_back;  /* where became RESIDENT */
    Page *pages;
    size_t num_pages, capacity;
    int where, goes_to; /* goes_to: of the move under way, or the last */
    size_t movable_bytes, fixed_bytes;
    CUcontext context; /* of the program's first allocation; those in others are left to the runtime */
    CUdevice device;
    size_t granularity, overhead_bytes, refused_bytes;
    uint64_t limit_bytes, reserve_bytes;
    int alone; /* nobody else uses the device: what it has free counts */
    int64_t others_bytes; /* what a real run has there beside the program's; it counts in place of that. -1: unknown */
    int is_open, holds_still, is_left; /* is_left: nobody will bring back what is out */
    int disk_fd, socket_fd;
    int num_workers;
} State;

extern State state;
extern Driver driver;

void *runtime_function(const char *symbol); /* of libcudart; NULL: there is none */
int load_driver(void);                      /* 0: there is none, or it lacks something */
void look_at_all(void);                     /* remember what devices use before this process opens one */
uint64_t cost_of_context(CUdevice device);  /* 0: nobody can tell */

CUresult back_page(Page *page);
void unback_page(Page *page);
uint64_t now_ns(void);

void move_out(int where, Moved *moved);
int open_pool(int fd, int rank);
int make_image(size_t num_bytes); /* for what goes out, one page after the other; 0, or an error of the system */
unsigned char *place_in_image(size_t offset, size_t *room, atomic_size_t *num_fresh);
void prepare(int num_threads);
void stop_preparing(void);
uint64_t ready_bytes(void); /* of what was prepared last */
void move_in(int into_reserve, Moved *moved); /* into_reserve: also where less is free then than is to be left free */

int start_service(void);
void tell_ready(uint64_t num_bytes, uint64_t fresh_bytes);
int ask_for_room(uint64_t num_bytes); /* 1: there may be room now */
void after_fork_in_child(void);

#define EXPORT __attribute__((visibility("default")))

#endif
