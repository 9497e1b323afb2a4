/* Serves the device allocations of a program from memory whose pages can be taken away and given back.
 *
 * Responsible for the table of pages, the limit and the runtime functions that stand before those of libcudart; moving
 * is moving.c's, the talk with the launcher service.c's, finding libraries libraries.c's.  Before prism_pages_open()
 * every function passes through.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUNTIME_OUT_OF_MEMORY = 2 };
#define SMALLEST_MOVABLE ((size_t)1 << 20) /* smaller ones would waste most of a page of 2 MiB */
#define TOTAL_OFFSET 288                   /* of totalGlobalMem in cudaDeviceProp, the same from CUDA 10 to 13 */

State state = {.lock = PTHREAD_MUTEX_INITIALIZER, .came_back = PTHREAD_COND_INITIALIZER, .disk_fd = -1, .socket_fd = -1};

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define CALL_REAL(symbol, parameters, arguments)                                                                       \
    static int (*function) parameters;                                                                                 \
    if (!function) function = (int(*) parameters)runtime_function(symbol);                                             \
    return function ? function arguments : 35 /* cudaErrorInsufficientDriver */

static int real_malloc(void **out, size_t size) { CALL_REAL("cudaMalloc", (void **, size_t), (out, size)); }
static int real_free(void *address) { CALL_REAL("cudaFree", (void *), (address)); }
static int real_mem_get_info(size_t *free, size_t *total) {
    CALL_REAL("cudaMemGetInfo", (size_t *, size_t *), (free, total));
}

/* -- pages --------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t alloc_lock = PTHREAD_MUTEX_INITIALIZER; /* one allocation at a time */

CUresult back_page(Page *page) {
    AllocationProp prop = {.type = 1, .location = {1, state.device}};
    AccessDesc access = {{1, state.device}, 3};
    CUresult result = driver.cuMemCreate(&page->handle, page->size, &prop, 0);
    if (result) return result;
    result = driver.cuMemMap(page->address, page->size, 0, page->handle, 0);
    if (!result) {
        result = driver.cuMemSetAccess(page->address, page->size, &access, 1);
        if (result) driver.cuMemUnmap(page->address, page->size);
    }
    if (result) driver.cuMemRelease(page->handle);
    return result;
}

void unback_page(Page *page) {
    driver.cuMemUnmap(page->address, page->size);
    driver.cuMemRelease(page->handle);
}

static int keep(Page page) {
    if (state.num_pages == state.capacity) {
        size_t capacity = state.capacity ? 2 * state.capacity : 64;
        Page *pages = realloc(state.pages, capacity * sizeof *pages);
        if (!pages) return 0;
        state.pages = pages;
        state.capacity = capacity;
    }
    state.pages[state.num_pages++] = page;
    *(page.movable ? &state.movable_bytes : &state.fixed_bytes) += page.size;
    return 1;
}

static int take(CUdeviceptr address, Page *page) {
    for (size_t i = state.num_pages; i-- > 0;) {
        if (state.pages[i].address != address) continue;
        *page = state.pages[i];
        memmove(state.pages + i, state.pages + i + 1, (--state.num_pages - i) * sizeof *page);
        *(page->movable ? &state.movable_bytes : &state.fixed_bytes) -= page->size;
        return 1;
    }
    return 0;
}

static void lock_resident(void) {
    pthread_mutex_lock(&state.lock);
    while (state.where != RESIDENT && !state.is_left) pthread_cond_wait(&state.came_back, &state.lock);
}

/* The context of this thread; on the first time what a page is and what the context has cost are found out. */
static CUcontext current_context(void) {
    CUcontext context = NULL;
    if (!load_driver()) return NULL;
    if (driver.cuCtxGetCurrent(&context) || !context) {
        real_free(NULL); /* the runtime makes the device's primary context, as its cudaMalloc would */
        if (driver.cuCtxGetCurrent(&context)) return NULL;
    }
    if (!context || state.context) return context;
    AllocationProp prop = {.type = 1};
    prop.location.type = 1;
    if (driver.cuCtxGetDevice(&state.device)) return NULL;
    prop.location.id = state.device;
    if (driver.cuMemGetAllocationGranularity(&state.granularity, &prop, 0) || !state.granularity) return NULL;
    size_t free, total;
    if (!driver.cuMemGetInfo(&free, &total) && state.reserve_bytes > total / 32) state.reserve_bytes = total / 32;
    state.overhead_bytes = cost_of_context(state.device);
    return state.context = context;
}

/* What the device would have free if this program had it for itself, under the limit; and how much it has in all. */
static int seen_memory(size_t *free, size_t *total) {
    size_t real_free_bytes, real_total;
    if (driver.cuMemGetInfo(&real_free_bytes, &real_total)) return 0;
    *total = state.limit_bytes && state.limit_bytes < real_total ? state.limit_bytes : real_total;
    size_t others = state.overhead_bytes;
    if (state.others_bytes > (int64_t)others) others = (size_t)state.others_bytes;
    size_t used = others + state.movable_bytes + state.fixed_bytes;
    if (state.alone && state.others_bytes < 0) used = real_total - real_free_bytes;
    *free = used < *total ? *total - used : 0;
    return 1;
}

static int is_beyond_limit(size_t size) {
    size_t free, total;
    if (!state.limit_bytes || !seen_memory(&free, &total) || size <= free) return 0;
    return 1;
}

static int malloc_fixed(void **out, size_t size) {
    int result = real_malloc(out, size);
    if (result || !*out) return result;
    pthread_mutex_lock(&state.lock);
    keep((Page){(CUdeviceptr)(uintptr_t)*out, size, 0, 0});
    pthread_mutex_unlock(&state.lock);
    return 0;
}

static int malloc_movable(void **out, size_t size) {
    Page page = {0, (size + state.granularity - 1) / state.granularity * state.granularity, 0, 1};
    if (driver.cuMemAddressReserve(&page.address, page.size, 0, 0, 0)) return malloc_fixed(out, size);
    size_t free, total;
    if (state.reserve_bytes && !driver.cuMemGetInfo(&free, &total) && free < page.size + state.reserve_bytes)
        ask_for_room(page.size + state.reserve_bytes - free);
    CUresult result;
    do {
        result = back_page(&page);
    } while (result == CUDA_OUT_OF_MEMORY && ask_for_room(page.size));
    if (!result) {
        pthread_mutex_lock(&state.lock);
        int kept = keep(page);
        pthread_mutex_unlock(&state.lock);
        if (kept) {
            *out = (void *)(uintptr_t)page.address;
            return 0;
        }
        unback_page(&page);
        result = CUDA_OUT_OF_MEMORY;
    }
    driver.cuMemAddressFree(page.address, page.size);
    return result == CUDA_OUT_OF_MEMORY ? RUNTIME_OUT_OF_MEMORY : malloc_fixed(out, size);
}

/* -- functions of the CUDA runtime ----------------------------------------------------------------------------------- */

EXPORT int cudaMalloc(void **out, size_t size) {
    if (!state.is_open || !out || !size) return real_malloc(out, size);
    pthread_mutex_lock(&alloc_lock);
    lock_resident();
    pthread_mutex_unlock(&state.lock);
    CUcontext context = current_context();
    int result = RUNTIME_OUT_OF_MEMORY;
    if (!context || context != state.context)
        result = real_malloc(out, size);
    else if (is_beyond_limit(size))
        ;
    else if (size < SMALLEST_MOVABLE || state.alone)
        result = malloc_fixed(out, size);
    else
        result = malloc_movable(out, size);
    if (result == RUNTIME_OUT_OF_MEMORY) state.refused_bytes = size;
    pthread_mutex_unlock(&alloc_lock);
    return result;
}

EXPORT int cudaFree(void *address) {
    if (!state.is_open || !address) return real_free(address);
    Page page;
    lock_resident();
    int known = take((CUdeviceptr)(uintptr_t)address, &page);
    pthread_mutex_unlock(&state.lock);
    if (!known || !page.movable) return real_free(address);
    driver.cuCtxSynchronize(); /* as cudaFree does: what still uses the memory ends first */
    unback_page(&page);
    driver.cuMemAddressFree(page.address, page.size);
    return 0;
}

EXPORT int cudaMemGetInfo(size_t *free, size_t *total) {
    if (!state.is_open || !free || !total) return real_mem_get_info(free, total);
    pthread_mutex_lock(&alloc_lock);
    CUcontext context = current_context();
    int seen = context && context == state.context && seen_memory(free, total);
    pthread_mutex_unlock(&alloc_lock);
    return seen ? 0 : real_mem_get_info(free, total);
}

static void show_limit(void *properties) {
    uint64_t total;
    memcpy(&total, (char *)properties + TOTAL_OFFSET, sizeof total);
    if (!state.is_open || !state.limit_bytes || state.limit_bytes >= total) return;
    memcpy((char *)properties + TOTAL_OFFSET, &state.limit_bytes, sizeof total);
}

static int real_properties(void *properties, int device) {
    CALL_REAL("cudaGetDeviceProperties", (void *, int), (properties, device));
}

static int real_properties_v2(void *properties, int device) {
    CALL_REAL("cudaGetDeviceProperties_v2", (void *, int), (properties, device));
}

EXPORT int cudaGetDeviceProperties(void *properties, int device) {
    int result = real_properties(properties, device);
    if (!result) show_limit(properties);
    return result;
}

EXPORT int cudaGetDeviceProperties_v2(void *properties, int device) {
    int result = real_properties_v2(properties, device);
    if (!result) show_limit(properties);
    return result;
}

/* -- control ------------------------------------------------------------------------------------------------------- */

/* Begin to serve allocations; once, before the program uses the device.
 *
 * socket_fd: to the launcher, which may then ask for moves; -1: nobody asks.  pool_fd: of host memory for pages, in
 * which those of `rank` are this program's; disk_fd: a file for pages; -1: none.
 * limit_bytes: what the device is to have; 0: what it has.  alone: no other process uses the device, and nothing moves.
 * reserve_bytes: how much is left free for what is not seen here.  others_bytes: what counts under the limit in place of
 * all that is not the program's; the context at least; -1: what is there.  Returns 0, -1 where there is no thread, or an
 * error of the system that there is no space for addresses.
 */
EXPORT int prism_pages_open(int socket_fd, int pool_fd, int rank, int disk_fd, uint64_t limit_bytes,
                            uint64_t reserve_bytes, int alone, int64_t others_bytes, int num_workers) {
    if (state.is_open) return -1;
    int code = pool_fd < 0 ? 0 : open_pool(pool_fd, rank);
    if (code) return code;
    state.socket_fd = socket_fd;
    state.disk_fd = disk_fd;
    state.limit_bytes = limit_bytes;
    state.reserve_bytes = socket_fd < 0 ? 0 : reserve_bytes;
    state.alone = alone;
    state.others_bytes = others_bytes;
    state.num_workers = num_workers < 1 ? 1 : num_workers;
    state.is_open = 1;
    look_at_all(); /* without cuInit: the program may still choose its devices */
    pthread_atfork(NULL, NULL, after_fork_in_child);
    return start_service();
}

EXPORT void prism_pages_stats(Stats *stats) {
    pthread_mutex_lock(&state.lock);
    *stats = (Stats){state.movable_bytes, state.fixed_bytes, state.overhead_bytes, state.limit_bytes,
                     state.refused_bytes, state.num_pages, (uint64_t)state.where};
    pthread_mutex_unlock(&state.lock);
}

/* What the real device has, whoever uses it.  Returns 0, or an error of the driver. */
EXPORT int prism_pages_real_memory(uint64_t *free, uint64_t *total) {
    size_t f = 0, t = 0;
    int result = state.context && driver.cuMemGetInfo ? driver.cuMemGetInfo(&f, &t) : real_mem_get_info(&f, &t);
    *free = f;
    *total = t;
    return result;
}

/* Whether pages may be moved at all: threads of the program that may use the device forbid it. */
EXPORT void prism_pages_hold_still(int holds_still) { state.holds_still = holds_still; }

EXPORT void prism_pages_out(int where, Moved *moved) { move_out(where, moved); }

EXPORT void prism_pages_in(int into_reserve, Moved *moved) { move_in(into_reserve, moved); }

EXPORT void prism_pages_prepare(int num_threads) { prepare(num_threads); }

EXPORT uint64_t prism_pages_ready_bytes(void) { return ready_bytes(); }
