/* One end of a link, as server/link/ring.py and arena.py lay it out. Orders of memory accesses are those of x86-64. */
#ifndef LINK_H
#define LINK_H

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define WAKE (1ull << 32)

typedef struct {
    uint32_t *tickets, *completions, *total_put; /* the cells of both rings; how many tickets were put so far */
    unsigned char *pages;                        /* slot n: its ticket is in page 2n, its completion in page 2n + 1 */
    uint64_t memory, memory_size;                /* the tensors: address and bytes */
    uint32_t count, page;                        /* slots; bytes of a page */
    int32_t ticket_event, completion_event, wakes; /* of `wakes` see server/link/listener.py */
} Link;

typedef struct __attribute__((packed)) {
    uint64_t serial;
    double deadline;
    uint64_t capacity, start, after;
    uint32_t length;
} TicketHead;

typedef struct __attribute__((packed)) {
    int64_t began, ended;
    uint32_t length;
} DoneHead;

static inline unsigned char *ticket_page(const Link *link, uint32_t slot) {
    return link->pages + (uint64_t)slot * 2 * link->page;
}

static inline unsigned char *completion_page(const Link *link, uint32_t slot) {
    return ticket_page(link, slot) + link->page;
}

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Wait until the eventfd is readable, for at most so many nanoseconds; whether it is. -1 only sleeps. */
static inline int wait_event(int event, int64_t ns) {
    struct pollfd file = {.fd = event, .events = POLLIN};
    struct timespec most = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    if (ns < 0) return 0;
    return ppoll(&file, 1, &most, NULL) > 0;
}

/* Add the count of the tickets' eventfd, more than INT32_MAX as that; returns 0 if there is nothing to read. Does not wait: the
 * HTTP side may have emptied it since it was looked at, and decides whether a plain read waits. Linux before 5.8, for one, has
 * plain reads only. */
static inline int add_event(int event, int64_t *count) {
    uint64_t value;
    ssize_t length;
#ifdef RWF_NOWAIT
    struct iovec part = {&value, sizeof value};
    length = preadv2(event, &part, 1, -1, RWF_NOWAIT);
    if (length < 0 && errno != EAGAIN)
#endif
        length = wait_event(event, 0) ? read(event, &value, sizeof value) : -1;
    if (length != (ssize_t)sizeof value) return 0;
    *count += value < INT32_MAX ? (int64_t)value : INT32_MAX;
    return 1;
}

/* Wait until tickets are announced, and add how many; returns when another thread of this process has woken it, too, and after
 * so many nanoseconds, if not less than 0. */
static inline void listen_for(const Link *link, int64_t *count, int64_t ns) {
    struct pollfd files[2] = {{.fd = link->ticket_event, .events = POLLIN}, {.fd = link->wakes, .events = POLLIN}};
    struct timespec most = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    uint64_t ignored;
    for (;;) {
        int ready = ppoll(files, 2, ns < 0 ? NULL : &most, NULL);
        int woken = read(link->wakes, &ignored, sizeof ignored) == (ssize_t)sizeof ignored;
        if (add_event(link->ticket_event, count) || woken || (!ready && ns >= 0)) return;
    }
}

static inline void write_event(int event, uint64_t value) {
    while (write(event, &value, sizeof value) < 0 && errno == EINTR) {
    }
}

/* Sleep in this thread to so many nanoseconds; returns what it was before, usually 50,000. */
static inline int set_timer_slack(int ns) {
    int before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, ns, 0, 0, 0);
    return before;
}

#endif
