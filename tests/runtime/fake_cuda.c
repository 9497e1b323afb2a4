/* Plays the CUDA driver (libcuda.so.1) and, with -DRUNTIME, its runtime (libcudart.so.13) in host memory, for tests;
 * with -DMANAGEMENT the management library (libnvidia-ml.so.1), where others begin at the same time.
 *
 * The file named in FAKE_DEVICE holds two numbers that all processes share: bytes in use and bytes in all.  Memory that
 * is unmapped can be neither read nor written, and new memory is zero, so a move that loses something is found out.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef unsigned long long u64;

static volatile u64 *device(void) {
    static volatile u64 *shared;
    if (!shared) {
        int fd = open(getenv("FAKE_DEVICE"), O_RDWR);
        shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
    }
    return shared;
}

static int use(u64 size) {
    if (__sync_add_and_fetch(device(), size) <= device()[1]) return 0;
    __sync_sub_and_fetch(device(), size);
    return 2;
}

#ifdef RUNTIME

static struct {
    void *address;
    u64 size;
} given[1024];

int cudaMalloc(void **out, size_t size) {
    if (use(size)) return 2;
    *out = calloc(1, size);
    for (int i = 0; i < 1024; i++)
        if (!given[i].address) {
            given[i].address = *out, given[i].size = size;
            return 0;
        }
    abort();
}

int cudaFree(void *address) {
    if (!address) return 0;
    for (int i = 0; i < 1024; i++)
        if (given[i].address == address) {
            __sync_sub_and_fetch(device(), given[i].size);
            given[i].address = NULL;
            free(address);
            return 0;
        }
    return 1;
}

int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = device()[1], *free_bytes = *total - device()[0];
    return 0;
}

int cudaGetDeviceProperties(void *properties, int number) {
    u64 total = device()[1];
    memset(properties, 0, 1024);
    memcpy((char *)properties + 288, &total, 8);
    return number ? 101 : 0;
}

#elif defined(MANAGEMENT)

typedef struct {
    unsigned pid;
    u64 used;
    unsigned instances[2];
} Process;

static int num_looks;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return *handle = &num_looks, index > 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **handle) {
    return *handle = &num_looks, strcmp(name, "00000000:00:06.0");
}
int nvmlDeviceGetIndex(void *handle, unsigned *index) { return *index = 0, handle != &num_looks; }
int nvmlDeviceGetMemoryInfo(void *handle, u64 *memory) {
    memory[2] = (u64)(getenv("FAKE_OTHERS") ? 5 : 1) << (num_looks++ ? 29 : 10); /* one context, or ten at once */
    return handle != &num_looks;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *num, Process *processes) {
    (void)device;
    processes[0] = (Process){1, 7, {0, 0}};
    processes[1] = (Process){(unsigned)getpid(), 540ull << 20, {0, 0}};
    return *num = 2, handle != &num_looks;
}

#else

#define GRANULARITY ((size_t)2 << 20)
#define MANY 4096

static int is_set_up = 1;
static struct {
    int fd;
    size_t size;
    int num_maps, is_released;
} handles[MANY];
static struct {
    u64 address;
    size_t size;
    int handle;
} maps[MANY];
static __thread void *current;

static void check(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "fake CUDA: %s\n", what);
    abort();
}

int cuInit(unsigned flags) { return (int)flags; }
int cuCtxGetCurrent(void **context) { return *context = current = (void *)&is_set_up, 0; }
int cuCtxSetCurrent(void *context) { return current = context, 0; }
int cuCtxGetDevice(int *number) { return *number = 0; }
int cuDeviceGetPCIBusId(char *name, int size, int number) {
    return snprintf(name, (size_t)size, "00000000:00:06.0") < 0 || number;
}
int cuCtxSynchronize(void) { return 0; }

/* A process is locked, out, back, unlocked; process 1 cannot be locked. */
static int stage;
static int pass(int from, int to) { return stage == from ? stage = to, 0 : 401; }
int cuCheckpointProcessLock(int pid, const void *arguments) {
    return *(const unsigned *)arguments ? pid == 1 ? 801 : pass(0, 1) : 1;
}
int cuCheckpointProcessCheckpoint(int pid, void *arguments) { return pid && arguments ? pass(1, 2) : 1; }
int cuCheckpointProcessRestore(int pid, void *arguments) { return pid && arguments ? pass(2, 3) : 1; }
int cuCheckpointProcessUnlock(int pid, void *arguments) { return pid && arguments ? pass(3, 0) : 1; }

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    *total = device()[1], *free_bytes = *total - device()[0];
    return 0;
}

int cuMemGetAllocationGranularity(size_t *size, const void *prop, int flags) {
    (void)prop;
    return *size = GRANULARITY, flags;
}

int cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
    (void)alignment, (void)wanted, (void)flags;
    check(size % GRANULARITY == 0, "an address range of odd size");
    void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? 2 : (*address = (u64)memory, 0);
}

int cuMemAddressFree(u64 address, size_t size) {
    for (int i = 0; i < MANY; i++) check(!maps[i].size || maps[i].address != address, "a mapped address is freed");
    return munmap((void *)address, size) ? 1 : 0;
}

int cuMemCreate(u64 *handle, size_t size, const void *prop, u64 flags) {
    (void)prop, (void)flags;
    check(size % GRANULARITY == 0, "memory of odd size");
    if (use(size)) return 2;
    for (int i = 1; i < MANY; i++) {
        if (handles[i].size) continue;
        handles[i].fd = memfd_create("fake", MFD_CLOEXEC);
        check(!ftruncate(handles[i].fd, (off_t)size), "no memory");
        handles[i].size = size, handles[i].num_maps = handles[i].is_released = 0;
        *handle = (u64)i;
        return 0;
    }
    abort();
}

static void settle(int handle) {
    if (!handles[handle].is_released || handles[handle].num_maps) return;
    close(handles[handle].fd);
    __sync_sub_and_fetch(device(), handles[handle].size);
    handles[handle].size = 0;
}

int cuMemRelease(u64 handle) {
    check(handles[handle].size && !handles[handle].is_released, "a handle is released twice");
    handles[handle].is_released = 1;
    settle((int)handle);
    return 0;
}

int cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    check(!offset && !flags && handles[handle].size == size && !handles[handle].is_released, "a wrong map");
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle].fd, 0);
    check(at != MAP_FAILED, "cannot map");
    handles[handle].num_maps++;
    for (int i = 0; i < MANY; i++)
        if (!maps[i].size) {
            maps[i].address = address, maps[i].size = size, maps[i].handle = (int)handle;
            return 0;
        }
    abort();
}

int cuMemSetAccess(u64 address, size_t size, const void *access, size_t count) {
    check(count == 1 && ((const int *)access)[2] == 3, "a wrong access");
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? 1 : 0;
}

int cuMemUnmap(u64 address, size_t size) {
    for (int i = 0; i < MANY; i++)
        if (maps[i].size == size && maps[i].address == address) {
            void *at = mmap((void *)address, size, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
            check(at != MAP_FAILED, "cannot unmap");
            maps[i].size = 0;
            handles[maps[i].handle].num_maps--;
            settle(maps[i].handle);
            return 0;
        }
    check(0, "what is not mapped is unmapped");
    return 1;
}

int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    *out = malloc(size);
    return *out ? (int)flags : 2;
}
int cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)&is_set_up, flags != 1; }
int cuStreamSynchronize(void *stream) { return stream ? 0 : 1; }

int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, void *stream) {
    check(current && stream, "a thread without a context");
    memcpy(to, (void *)from, size);
    return 0;
}

int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, void *stream) {
    check(current && stream, "a thread without a context");
    memcpy((void *)to, from, size);
    return 0;
}

#endif
