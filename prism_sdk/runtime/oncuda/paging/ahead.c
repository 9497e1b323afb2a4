/* Has the system hand out host memory for pages before they have to move.
 *
 * Responsible for that memory, and for the threads that touch it first; how much is to be ready is the launcher's.  A
 * move into memory that nobody has touched waits for the system to clear it, at less than half the speed of the copies.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#define STEP ((size_t)16 << 20)
#define HUGE_PAGE ((size_t)2 << 20)
#define MOST_THREADS 8

/* Who touches memory holds it for reading, who makes or drops it for writing (and state.lock, as moves do). */
static pthread_rwlock_t image_lock = PTHREAD_RWLOCK_INITIALIZER;
static atomic_size_t wanted, next, ready;
static atomic_int num_running;

int make_image(size_t num_bytes) {
    if (state.image && state.mapping_bytes >= num_bytes + HUGE_PAGE) return 0;
    drop_image();
    size_t size = num_bytes + num_bytes / 4 + HUGE_PAGE; /* a program that grows a little keeps what is there */
    void *mapping = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return ENOMEM;
    madvise(mapping, size, MADV_HUGEPAGE);
    madvise(mapping, size, MADV_DONTFORK);
    pthread_rwlock_wrlock(&image_lock);
    state.image = (unsigned char *)(((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    state.image_mapping = mapping;
    state.mapping_bytes = size;
    pthread_rwlock_unlock(&image_lock);
    return 0;
}

/* Give the host its memory back; only while nothing is in it. */
void drop_image(void) {
    wanted = 0;
    pthread_rwlock_wrlock(&image_lock);
    if (state.image) munmap(state.image_mapping, state.mapping_bytes);
    state.image = NULL;
    ready = 0;
    pthread_rwlock_unlock(&image_lock);
}

void drop_if_unused(void) {
    pthread_mutex_lock(&state.lock);
    if (state.where != IN_HOST_MEMORY) drop_image();
    pthread_mutex_unlock(&state.lock);
}

static int touch_next(void) {
    pthread_rwlock_rdlock(&image_lock);
    size_t at = atomic_fetch_add(&next, STEP), end = wanted;
    int there = state.image && at < end;
    if (there) {
        size_t size = end - at < STEP ? end - at : STEP;
        if (madvise(state.image + at, size, MADV_POPULATE_WRITE))
            there = 0; /* an old system, or one without memory: moves do as well */
        else
            atomic_fetch_add(&ready, size);
    }
    pthread_rwlock_unlock(&image_lock);
    return there;
}

static void *touch(void *unused) {
    (void)unused;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19); /* who computes comes first */
    while (touch_next())
        ;
    if (atomic_fetch_sub(&num_running, 1) == 1) tell_ready(ready);
    return NULL;
}

uint64_t ready_bytes(void) { return ready; }

/* A move begins: what is not there by now it takes itself. */
void stop_preparing(void) { wanted = 0; }

/* Begin to have `num_bytes` ready; the launcher is told when it is, or when it will not be. */
void prepare(uint64_t num_bytes, int num_threads) {
    int code = EBUSY;
    pthread_mutex_lock(&state.lock);
    if (state.where == RESIDENT && !num_running) code = make_image(num_bytes);
    pthread_mutex_unlock(&state.lock);
    if (code) {
        tell_ready(ready);
        return;
    }
    if (num_threads > MOST_THREADS) num_threads = MOST_THREADS;
    next = ready = 0;
    wanted = num_bytes;
    num_running = 1; /* we, until all have begun */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's */
    for (int i = 0; i < num_threads; i++) {
        pthread_t thread;
        atomic_fetch_add(&num_running, 1);
        if (pthread_create(&thread, NULL, touch, NULL))
            atomic_fetch_sub(&num_running, 1);
        else
            pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (atomic_fetch_sub(&num_running, 1) == 1) tell_ready(ready);
}
