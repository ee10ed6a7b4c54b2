/* When a work may begin so that its tenant stays within its share of PCIe: the rules of server/workers/pace.py, which says why.
 * tests/server/launch_loop/test_pacing.py compares the two. All times are nanoseconds. */
#ifndef PACING_H
#define PACING_H

#include "neighbours.h"

#define CATCH_UP 2000000ll
#define LOOK 5000000ll

/* Of a tenant with a share of PCIe. `rate` is in bytes a second, each way. */
typedef struct {
    int64_t rate, free_in, free_out;
    uint64_t waits; /* works that had to wait so far */
    Neighbours neighbours;
} Pace;

/* How long a work has to wait until the next look; 0 if it may begin. */
static inline int64_t pace_wait(const Pace *p, int64_t now) {
    int64_t left = (p->free_in > p->free_out ? p->free_in : p->free_out) - now;
    if (left <= 0 || !at_work(&p->neighbours, now)) return 0;
    return left < LOOK ? left : LOOK;
}

static inline int64_t put_off(int64_t free_at, int64_t now, uint64_t nbytes, int64_t rate) {
    int64_t from = free_at > now - CATCH_UP ? free_at : now - CATCH_UP;
    if (!nbytes) return free_at;
    return from + (int64_t)(((unsigned __int128)nbytes * 1000000000 + (uint64_t)rate - 1) / (uint64_t)rate);
}

/* A work that begins now moves so many bytes. */
static inline void pace_charge(Pace *p, int64_t now, uint64_t in, uint64_t out) {
    if (!at_work(&p->neighbours, now)) return;
    p->free_in = put_off(p->free_in, now, in, p->rate);
    p->free_out = put_off(p->free_out, now, out, p->rate);
}

#endif
