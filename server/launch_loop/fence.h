/* Whether a work of a fenced tenant goes to its narrow placement: the rules of server/workers/fence.py, which says why.
 * tests/server/launch_loop/test_fence.py compares the two. */
#ifndef FENCE_H
#define FENCE_H

#include "neighbours.h"

/* What works of one model need: nanoseconds at home and on the narrow placement, bytes that they move; 0 for what is not known,
 * and bytes below 0 for works that are held whatever they move. The worker and the launch loop share it, and never have works in
 * flight at the same time. */
typedef struct {
    int64_t home, narrow, moved;
} Demand;

/* Of a worker with a narrow placement. `rate` is in bytes a second. */
typedef struct {
    int64_t rate;
    volatile uint64_t *launches; /* works that went narrow so far */
    Neighbours neighbours;
} Fence;

static inline int exceeds(int64_t moved, int64_t home, int64_t rate) {
    return home > 0 && (moved < 0 || (__int128)moved * 1000000000 > (__int128)rate * home);
}

static inline int goes_narrow(const Fence *f, const Demand *d, int64_t now) {
    return exceeds(d->moved, d->home, f->rate) && at_work(&f->neighbours, now);
}

/* Whether a work stays at home that may go wide. `units` and `wide` are of both partitions. */
static inline int stays_home(const Fence *f, const Demand *d, int64_t units, int64_t wide, int64_t now) {
    int more = d->moved < 0 || (__int128)d->moved * 1000000000 * wide > (__int128)f->rate * d->home * units;
    return d->home > 0 && more && at_work(&f->neighbours, now);
}

static inline void learn_time(int64_t *known, int64_t took) { *known = towards(*known, took); }

#endif
