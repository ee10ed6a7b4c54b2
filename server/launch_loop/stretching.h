/* Whether a work goes to its tenant's home partition or to the wide one: the rules of server/workers/stretching.py, which says
 * why. tests/server/launch_loop/test_stretching.py compares the two. All times are nanoseconds. */
#ifndef STRETCHING_H
#define STRETCHING_H

#include <stdint.h>

#define MOST_LENDERS 256 /* of which each HTTP process is one */
#define SETTLED 100000000ll
#define RETRY 1000000000ll
#define LONGEST_RETRY 256000000000ll

enum { OPEN, ENDED, LENDS }; /* words of a lender's page; see server/link/activity.py */
enum { WENT_WIDE, IN_FLIGHT, LENDER_BUSY, LENDER_STOPPED, NOT_MEASURED, TOO_LONG, NO_FASTER, FENCED, DECISIONS };
enum { BUSY = -1, STOPPED = -2 }; /* in place of when the lenders began to rest */

/* What works of one model and shapes take; 0 for what is not known. `wait` is RETRY at first. */
typedef struct {
    int64_t home, wide, retry_at, wait;
} Times;

typedef struct {
    volatile uint64_t *words; /* a lender's page */
    volatile uint64_t *own;   /* the borrower's word, which the lender reads */
} Lender;

/* Of a worker with a wide partition. `home` and `wide` are the units of its partitions. */
typedef struct {
    int64_t limit, home, wide;
    uint64_t launches, returns; /* works that went wide so far; those of them to which a lender came back */
    uint64_t stayed[DECISIONS]; /* works that stayed at home, by why */
    uint64_t ended_before;      /* of the work in flight: the sum of the lenders' ENDED when it was launched */
    uint32_t count;
    Lender lenders[MOST_LENDERS];
} Wide;

/* When the last lender began to rest; BUSY or STOPPED if one does not rest, or does not lend. */
static inline int64_t rested_since(const Wide *b) {
    int64_t since = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        volatile uint64_t *words = b->lenders[i].words;
        if (!words[LENDS]) return STOPPED;
        if (words[OPEN]) return BUSY;
        if ((int64_t)words[ENDED] > since) since = (int64_t)words[ENDED];
    }
    return since;
}

/* Changes when a lender has had a request and rests again. */
static inline uint64_t ends(const Wide *b) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < b->count; i++) sum += b->lenders[i].words[ENDED];
    return sum;
}

static inline int64_t known(const Times *t, int64_t now) { return t->retry_at && now >= t->retry_at ? 0 : t->wide; }

/* The new estimate; 0 is unknown, and never returned. */
static inline int64_t towards(int64_t before, int64_t took) {
    if (before) took = took > before ? before + (took - before) / 8 : before - (before - took) / 8;
    return took ? took : 1;
}

static inline void learn_home(Times *t, int64_t took) { t->home = towards(t->home, took); }

static inline void learn_wide(Times *t, int64_t took, int64_t limit, int64_t now) {
    t->wide = towards(known(t, now), took);
    if (t->wide <= limit && t->wide < t->home) {
        t->retry_at = 0;
        t->wait = RETRY;
    } else {
        t->retry_at = now + t->wait;
        t->wait = 2 * t->wait < LONGEST_RETRY ? 2 * t->wait : LONGEST_RETRY;
    }
}

static inline int decide(const Times *t, int64_t now, int64_t limit, int64_t home, int64_t wide, int in_flight, int64_t since) {
    int64_t took = known(t, now);
    if (in_flight) return IN_FLIGHT;
    if (since < 0) return since == BUSY ? LENDER_BUSY : LENDER_STOPPED;
    if (took > limit) return TOO_LONG;
    if (took) return took < t->home ? WENT_WIDE : NO_FASTER;
    if (!t->home) return NOT_MEASURED;
    if (t->home * home > limit * wide) return TOO_LONG;
    return t->home <= limit || now - since >= SETTLED ? WENT_WIDE : NOT_MEASURED;
}

/* Say to every lender whether a work uses its granules. */
static inline void mark(const Wide *b, uint64_t used) {
    for (uint32_t i = 0; i < b->count; i++) *b->lenders[i].own = used;
}

#endif
