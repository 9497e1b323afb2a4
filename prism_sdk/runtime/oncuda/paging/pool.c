/* The host memory that pages move to: blocks of a file without a name, which the launcher and all ranks have mapped.
 *
 * Responsible for finding the blocks of this rank, and for having the system hand out those that nobody has used yet, in
 * a move or before it.  Whose a block is the launcher says, before it asks for anything.
 *
 * A move into memory that nobody has touched waits for the system to clear it, at less than half the speed of the
 * copies.  Memory of a file stays when it changes hands, so that is paid once for a block, not once for each rank.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif
#define BLOCK ((size_t)2 << 20) /* a huge page; as in hostpool.py */
#define SMALL_PAGE 4096
#define MOST_THREADS 8

typedef struct { /* the start of the file, as hostpool.py writes it; behind it `num_blocks` of `owners` and of `is_there` */
    uint64_t num_blocks, data_offset;
    _Atomic int32_t owners[]; /* rank + 1; 0: nobody's */
} Table;

static Table *table;
static _Atomic unsigned char *is_there; /* the system has handed it out */
static _Atomic unsigned char *is_mapped; /* into this process */
static unsigned char *data;
static int32_t owner;
static uint32_t *blocks; /* where the image is, one page after the other */
static size_t num_blocks;
static atomic_size_t next, ready, fresh;
static atomic_int goes_on, num_running;

/* 0, or an error of the system. */
int open_pool(int fd, int rank) {
    struct stat status;
    if (fstat(fd, &status)) return errno;
    size_t size = (size_t)status.st_size;
    unsigned char *space = mmap(NULL, size + BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED) return errno;
    space = (unsigned char *)(((uintptr_t)space + BLOCK - 1) / BLOCK * BLOCK);
    if (mmap(space, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return errno;
    madvise(space, size, MADV_DONTFORK);
    madvise(space, size, MADV_DONTDUMP);
    madvise(space, size, MADV_HUGEPAGE);
    table = (Table *)space;
    is_there = (_Atomic unsigned char *)(table->owners + table->num_blocks);
    data = space + table->data_offset;
    owner = rank + 1;
    is_mapped = calloc(table->num_blocks ? table->num_blocks : 1, 1);
    blocks = malloc((table->num_blocks ? table->num_blocks : 1) * sizeof *blocks);
    return is_mapped && blocks ? 0 : ENOMEM;
}

/* Whether this rank's blocks hold so much; where they are is kept until the next time. */
int make_image(size_t num_bytes) {
    num_blocks = 0;
    for (size_t i = 0; table && i < table->num_blocks; i++)
        if (table->owners[i] == owner) blocks[num_blocks++] = (uint32_t)i;
    return num_blocks * BLOCK < num_bytes ? ENOMEM : 0;
}

/* Have a block mapped, in a huge page where the system can. Returns how much it has handed out for it.
 *
 * It only reads: who has come by the block in the meantime keeps what is in it.  Memory of a file comes in small pages,
 * at a quarter of the speed, unless the system is asked to collapse what is there into a huge one.
 */
static size_t have(size_t index) {
    if (is_there[index] && is_mapped[index]) return 0;
    unsigned char *at = data + index * BLOCK;
    int is_new = !is_there[index];
    if (is_new) {
        (void)*(volatile unsigned char *)at;
        madvise(at, BLOCK, MADV_COLLAPSE);
    }
    if (madvise(at, BLOCK, MADV_POPULATE_READ) && errno == EINVAL) /* an old system: page by page */
        for (size_t i = 0; i < BLOCK; i += SMALL_PAGE) (void)*(volatile unsigned char *)(at + i);
    is_there[index] = is_mapped[index] = 1;
    return is_new ? BLOCK : 0;
}

/* Where a place of the image is, and how much follows there. */
unsigned char *place_in_image(size_t offset, size_t *room, atomic_size_t *num_fresh) {
    size_t index = blocks[offset / BLOCK];
    *num_fresh += have(index);
    *room = BLOCK - offset % BLOCK;
    return data + index * BLOCK + offset % BLOCK;
}

static void *touch(void *unused) {
    (void)unused;
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19); /* who computes comes first */
    for (size_t index; goes_on && (index = atomic_fetch_add(&next, 1)) < table->num_blocks;) {
        if (table->owners[index] != owner) continue;
        fresh += have(index);
        ready += BLOCK;
    }
    if (atomic_fetch_sub(&num_running, 1) == 1) tell_ready(ready, fresh);
    return NULL;
}

uint64_t ready_bytes(void) { return ready; }

/* A move begins: what is not there by now it takes itself. */
void stop_preparing(void) { goes_on = 0; }

/* Begin to have this rank's blocks ready; the launcher is told when they are, or when they will not be. */
void prepare(int num_threads) {
    if (!table || num_running) {
        tell_ready(0, 0);
        return;
    }
    if (num_threads > MOST_THREADS) num_threads = MOST_THREADS;
    next = ready = fresh = 0;
    goes_on = 1;
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
    if (atomic_fetch_sub(&num_running, 1) == 1) tell_ready(ready, fresh);
}
