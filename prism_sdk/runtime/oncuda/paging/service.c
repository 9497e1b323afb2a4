/* Talks with the launcher about pages, in a thread of its own: a parked rank's other threads need not run for it.
 *
 * Responsible for messages; what they ask for is done by moving.c.  All are of one size, in the machine's byte order.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

/* OUT, IN, ROOM and PREPARE (the rank's blocks of host memory, by `argument` threads) come from the launcher; NEED, MOVED
 * and READY (so many bytes were prepared) go to it. */
enum { OUT = 1, IN = 2, NEED = 3, MOVED = 4, ROOM = 5, PREPARE = 6, READY = 7 };

typedef struct {
    uint32_t kind, argument; /* OUT: where to; IN: 1 into the reserve; ROOM: 1: try again */
    Moved moved;             /* of MOVED; NEED has num_bytes, and in copy_ns how much could move */
} Message;

_Static_assert(sizeof(Message) == 48, "a message has 48 bytes");

static pthread_mutex_t room_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t room_told = PTHREAD_COND_INITIALIZER;
static int room_answer = -1, is_gone = 1;

static pthread_mutex_t send_lock = PTHREAD_MUTEX_INITIALIZER;

static int transfer(int is_send, Message *message) {
    char *at = (char *)message;
    for (size_t left = sizeof *message; left;) {
        ssize_t count = is_send ? send(state.socket_fd, at, left, MSG_NOSIGNAL) : recv(state.socket_fd, at, left, 0);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        at += count, left -= (size_t)count;
    }
    return 1;
}

static int say(Message *message) {
    pthread_mutex_lock(&send_lock);
    int said = transfer(1, message);
    pthread_mutex_unlock(&send_lock);
    return said;
}

void tell_ready(uint64_t num_bytes, uint64_t fresh_bytes) {
    Message message = {READY, 0, {.num_bytes = num_bytes, .fresh_bytes = fresh_bytes}};
    if (state.socket_fd >= 0) say(&message);
}

static void tell_room(int answer) {
    pthread_mutex_lock(&room_lock);
    room_answer = answer;
    if (answer < 0) is_gone = 1;
    pthread_cond_broadcast(&room_told);
    pthread_mutex_unlock(&room_lock);
}

static void *serve(void *unused) {
    (void)unused;
    Message message;
    while (transfer(0, &message)) {
        if (message.kind == ROOM) {
            tell_room(message.argument == 1);
            continue;
        }
        if (message.kind == PREPARE) {
            prepare((int)message.argument);
            continue;
        }
        Message reply = {MOVED, message.kind, {0}};
        if (message.kind == OUT)
            move_out((int)message.argument, &reply.moved);
        else if (message.kind == IN)
            move_in((int)message.argument, &reply.moved);
        else
            continue;
        if (!say(&reply)) break;
    }
    tell_room(-1); /* the launcher is gone, and this process soon too */
    pthread_mutex_lock(&state.lock);
    state.is_left = 1;
    pthread_cond_broadcast(&state.came_back);
    pthread_mutex_unlock(&state.lock);
    return NULL;
}

int start_service(void) {
    if (state.socket_fd < 0) return 0;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's */
    is_gone = 0;
    int failed = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return -1;
    pthread_detach(thread);
    return 0;
}

int ask_for_room(uint64_t num_bytes) {
    if (state.socket_fd < 0) return 0;
    Message message = {NEED, 0, {.num_bytes = num_bytes, .copy_ns = state.movable_bytes}};
    pthread_mutex_lock(&room_lock);
    room_answer = -1;
    int answer = 0;
    if (!is_gone && say(&message)) {
        while (room_answer < 0 && !is_gone) pthread_cond_wait(&room_told, &room_lock);
        answer = room_answer == 1;
    }
    pthread_mutex_unlock(&room_lock);
    return answer;
}

void after_fork_in_child(void) {
    if (state.socket_fd >= 0) close(state.socket_fd);
    state.socket_fd = -1;
    state.is_open = 0; /* CUDA cannot be used in here */
}
