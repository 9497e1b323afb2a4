/* Moves the pages of a program to host memory or to disk, and back to the addresses they had.
 *
 * Responsible for the copies and the memory they go to; when and whose pages move is decided elsewhere.
 *
 * Each worker has two pinned buffers and a stream: one buffer is copied by the device while the worker copies the other
 * to its place.  So little memory is pinned, however much moves, and a single thread's memcpy is no bound.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK ((size_t)4 << 20)
#define MAX_WORKERS 32

typedef struct {
    CUdeviceptr address;
    size_t size, offset; /* in the image */
} Chunk;

typedef struct {
    unsigned char *buffers[2];
    CUstream streams[2];
} Stage;

static Stage stages[MAX_WORKERS];
static int num_stages;

typedef struct {
    Chunk *chunks;
    size_t num_chunks;
    atomic_size_t next, num_backed; /* num_backed: chunks whose addresses have memory */
    atomic_int failed, code; /* a status of a move; the driver's or the system's code */
    atomic_size_t num_fresh;
    int is_out;
} Job;

static void fail(Job *job, int status, int code) {
    int none = 0;
    if (atomic_compare_exchange_strong(&job->failed, &none, status)) atomic_store(&job->code, code);
}

/* Pinned memory for the first move; kept for the next ones. */
static int prepare_stages(int num) {
    if (num > MAX_WORKERS) num = MAX_WORKERS;
    while (num_stages < num) {
        Stage *stage = stages + num_stages;
        void *memory;
        if (driver.cuMemHostAlloc(&memory, 2 * CHUNK, 0)) break;
        stage->buffers[0] = memory;
        stage->buffers[1] = stage->buffers[0] + CHUNK;
        if (driver.cuStreamCreate(stage->streams, 1) || driver.cuStreamCreate(stage->streams + 1, 1)) break;
        num_stages++;
    }
    return num_stages < num ? num_stages : num;
}

/* The copy is not read again soon: written past the caches, memory need not be read first (51 in place of 44 GB/s). */
#ifdef __SSE2__
#include <emmintrin.h>
static void copy_past_caches(unsigned char *to, const unsigned char *from, size_t size) {
    for (; size >= 64; to += 64, from += 64, size -= 64)
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(from + i)));
    _mm_sfence();
    memcpy(to, from, size);
}
#else
static void copy_past_caches(unsigned char *to, const unsigned char *from, size_t size) { memcpy(to, from, size); }
#endif

static int store(Job *job, size_t offset, const unsigned char *from, size_t size) {
    for (size_t room; state.goes_to != ON_DISK && size; from += room, offset += room, size -= room) {
        unsigned char *to = place_in_image(offset, &room, &job->num_fresh);
        if (room > size) room = size;
        copy_past_caches(to, from, room);
    }
    while (size) {
        ssize_t written = pwrite(state.disk_fd, from, size, (off_t)offset);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return written ? errno : EIO;
        from += written, offset += (size_t)written, size -= (size_t)written;
    }
    return 0;
}

static int fetch(Job *job, size_t offset, unsigned char *to, size_t size) {
    for (size_t room; state.goes_to != ON_DISK && size; to += room, offset += room, size -= room) {
        const unsigned char *from = place_in_image(offset, &room, &job->num_fresh);
        if (room > size) room = size;
        memcpy(to, from, room);
    }
    while (size) {
        ssize_t got = pread(state.disk_fd, to, size, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got ? errno : EIO;
        to += got, offset += (size_t)got, size -= (size_t)got;
    }
    return 0;
}

static void carry_out(Job *job, Stage *stage) {
    Chunk *before = NULL;
    size_t index;
    int turn = 0, code;
    while (!job->failed && (index = atomic_fetch_add(&job->next, 1)) < job->num_chunks) {
        Chunk *chunk = job->chunks + index;
        code = driver.cuMemcpyDtoHAsync(stage->buffers[turn], chunk->address, chunk->size, stage->streams[turn]);
        if (code) fail(job, DRIVER_ERROR, code);
        if (before && (code = store(job, before->offset, stage->buffers[!turn], before->size))) fail(job, NO_DISK, code);
        if ((code = driver.cuStreamSynchronize(stage->streams[turn]))) fail(job, DRIVER_ERROR, code);
        before = chunk;
        turn = !turn;
    }
    if (!job->failed && before && (code = store(job, before->offset, stage->buffers[!turn], before->size)))
        fail(job, NO_DISK, code);
}

static void carry_in(Job *job, Stage *stage) {
    size_t index;
    int turn = 0, code;
    while (!job->failed && (index = atomic_fetch_add(&job->next, 1)) < job->num_chunks) {
        Chunk *chunk = job->chunks + index;
        if ((code = driver.cuStreamSynchronize(stage->streams[turn]))) fail(job, DRIVER_ERROR, code);
        if ((code = fetch(job, chunk->offset, stage->buffers[turn], chunk->size))) fail(job, NO_DISK, code);
        while (atomic_load(&job->num_backed) <= index && !job->failed) sched_yield();
        if (job->failed) break;
        code = driver.cuMemcpyHtoDAsync(chunk->address, stage->buffers[turn], chunk->size, stage->streams[turn]);
        if (code) fail(job, DRIVER_ERROR, code);
        turn = !turn;
    }
    for (int i = 0; i < 2; i++)
        if ((code = driver.cuStreamSynchronize(stage->streams[i]))) fail(job, DRIVER_ERROR, code);
}

typedef struct {
    Job *job;
    Stage *stage;
} Task;

static void *work(void *data) {
    Task *task = data;
    cpu_set_t cpus; /* a rank is bound to few of them, and parked it uses none: those of the process that forked it */
    if (!sched_getaffinity(getppid(), sizeof cpus, &cpus)) sched_setaffinity(0, sizeof cpus, &cpus);
    driver.cuCtxSetCurrent(state.context);
    (task->job->is_out ? carry_out : carry_in)(task->job, task->stage);
    return NULL;
}

typedef struct {
    pthread_t threads[MAX_WORKERS];
    Task tasks[MAX_WORKERS];
    int num_started;
} Team;

static void begin(Team *team, Job *job, int num_workers) {
    for (team->num_started = 0; team->num_started < num_workers; team->num_started++) {
        Task *task = team->tasks + team->num_started;
        *task = (Task){job, stages + team->num_started};
        if (pthread_create(team->threads + team->num_started, NULL, work, task)) break;
    }
}

static void finish(Team *team, Job *job) {
    if (!team->num_started) work(&(Task){job, stages}); /* no thread to be had */
    for (int i = 0; i < team->num_started; i++) pthread_join(team->threads[i], NULL);
}

/* The movable pages in chunks; NULL without memory for the list. */
static Chunk *chunks_of_pages(size_t *num) {
    size_t count = 0, offset = 0;
    for (size_t i = 0; i < state.num_pages; i++)
        if (state.pages[i].movable) count += (state.pages[i].size + CHUNK - 1) / CHUNK;
    Chunk *chunks = malloc((count ? count : 1) * sizeof *chunks), *chunk = chunks;
    if (!chunks) return NULL;
    for (size_t i = 0; i < state.num_pages; i++) {
        Page *page = state.pages + i;
        for (size_t done = 0; page->movable && done < page->size; done += chunk->size, offset += chunk->size, chunk++)
            *chunk = (Chunk){page->address + done, page->size - done < CHUNK ? page->size - done : CHUNK, offset};
    }
    *num = count;
    return chunks;
}

static int make_room_for_image(int where, size_t num_bytes) {
    if (where == ON_DISK) {
        if (state.disk_fd < 0) return EBADF;
        int code = posix_fallocate(state.disk_fd, 0, (off_t)num_bytes); /* a full disk is found out now */
        if (code) (void)!ftruncate(state.disk_fd, 0);
        return code;
    }
    return make_image(num_bytes);
}

static void move_out_locked(int where, Moved *moved) {
    if (state.where != RESIDENT || !state.movable_bytes) return; /* nothing to do: no bytes moved */
    if (state.holds_still) {
        moved->status = NOT_NOW;
        return;
    }
    stop_preparing();
    driver.cuCtxSetCurrent(state.context);
    if ((moved->code = (uint32_t)driver.cuCtxSynchronize())) {
        moved->status = DRIVER_ERROR;
        return;
    }
    int num_workers = prepare_stages(state.num_workers);
    Job job = {.is_out = 1};
    job.chunks = chunks_of_pages(&job.num_chunks);
    if (!num_workers || !job.chunks || (moved->code = (uint32_t)make_room_for_image(where, state.movable_bytes))) {
        moved->status = where == ON_DISK && num_workers && job.chunks ? NO_DISK : NO_HOST_MEMORY;
        moved->num_bytes = state.movable_bytes;
        free(job.chunks);
        return;
    }
    uint64_t started = now_ns();
    state.goes_to = where;
    Team team;
    begin(&team, &job, num_workers);
    finish(&team, &job);
    moved->copy_ns = now_ns() - started;
    moved->fresh_bytes = job.num_fresh;
    free(job.chunks);
    if ((moved->status = (uint32_t)job.failed)) { /* the pages are still there */
        moved->code = (uint32_t)job.code;
        if (where == ON_DISK) (void)!ftruncate(state.disk_fd, 0);
        return;
    }
    for (size_t i = 0; i < state.num_pages; i++)
        if (state.pages[i].movable) unback_page(state.pages + i);
    state.where = where;
    moved->num_bytes = state.movable_bytes;
}

static void move_in_locked(int into_reserve, Moved *moved) {
    if (state.where == RESIDENT) return;
    driver.cuCtxSetCurrent(state.context);
    size_t free_bytes, total, wanted = state.movable_bytes + (into_reserve ? 0 : state.reserve_bytes);
    if (!driver.cuMemGetInfo(&free_bytes, &total) && free_bytes < wanted) {
        moved->status = NO_DEVICE_MEMORY;
        moved->num_bytes = wanted - free_bytes;
        return;
    }
    Job job = {.is_out = 0};
    job.chunks = chunks_of_pages(&job.num_chunks);
    if (!job.chunks) {
        moved->status = NO_HOST_MEMORY;
        return;
    }
    uint64_t started = now_ns();
    Team team; /* copies while pages are still being mapped */
    begin(&team, &job, num_stages < state.num_workers ? num_stages : state.num_workers);
    size_t backed = 0, num_chunks = 0;
    for (; backed < state.num_pages; backed++) {
        Page *page = state.pages + backed;
        if (!page->movable) continue;
        CUresult code = back_page(page);
        if (code) {
            fail(&job, code == CUDA_OUT_OF_MEMORY ? NO_DEVICE_MEMORY : DRIVER_ERROR, code);
            break;
        }
        num_chunks += (page->size + CHUNK - 1) / CHUNK;
        atomic_store(&job.num_backed, num_chunks);
    }
    finish(&team, &job);
    moved->copy_ns = now_ns() - started;
    free(job.chunks);
    moved->status = (uint32_t)job.failed;
    moved->code = (uint32_t)job.code;
    if (job.failed) { /* what is out is still whole: it may be tried again */
        for (size_t i = 0; i < backed; i++)
            if (state.pages[i].movable) unback_page(state.pages + i);
        for (size_t i = backed; i < state.num_pages; i++)
            if (state.pages[i].movable) moved->num_bytes += state.pages[i].size;
        return;
    }
    moved->num_bytes = state.movable_bytes;
    if (state.where == ON_DISK) (void)!ftruncate(state.disk_fd, 0);
    state.where = RESIDENT;
    pthread_cond_broadcast(&state.came_back);
}

void move_out(int where, Moved *moved) {
    uint64_t started = now_ns();
    *moved = (Moved){0};
    pthread_mutex_lock(&state.lock);
    move_out_locked(where, moved);
    pthread_mutex_unlock(&state.lock);
    moved->total_ns = now_ns() - started;
}

void move_in(int into_reserve, Moved *moved) {
    uint64_t started = now_ns();
    *moved = (Moved){0};
    pthread_mutex_lock(&state.lock);
    move_in_locked(into_reserve, moved);
    pthread_mutex_unlock(&state.lock);
    moved->total_ns = now_ns() - started;
}
