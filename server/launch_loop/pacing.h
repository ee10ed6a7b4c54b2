/* When a work may begin so that its tenant stays within its shares of PCIe and memory: the rules of server/workers/pace.py,
 * which says why. tests/server/launch_loop/test_pacing.py compares the two. All times are nanoseconds. */
#ifndef PACING_H
#define PACING_H

#include "neighbours.h"

#define CATCH_UP 2000000ll
#define LOOK 5000000ll

/* Paths: over PCIe to the device and from it, and its memory. */
enum { IN, OUT, MEMORY, PATHS };

/* Of a tenant with shares. `rates` are in bytes a second, 0 for all there is. */
typedef struct {
    int64_t rates[PATHS], free_at[PATHS];
    uint64_t waits; /* works that had to wait for PCIe so far */
    Neighbours neighbours;
} Pace;

static inline int64_t pcie_left(const Pace *p, int64_t now) {
    return (p->free_at[IN] > p->free_at[OUT] ? p->free_at[IN] : p->free_at[OUT]) - now;
}

/* How long a work has to wait until the next look; 0 if it may begin. */
static inline int64_t pace_wait(const Pace *p, int64_t now) {
    int64_t pcie = pcie_left(p, now), memory = p->free_at[MEMORY] - now, left = pcie > memory ? pcie : memory;
    if (left <= 0 || !at_work(&p->neighbours, now)) return 0;
    return left < LOOK ? left : LOOK;
}

static inline void put_off(Pace *p, int path, int64_t now, uint64_t nbytes) {
    int64_t from = p->free_at[path] > now - CATCH_UP ? p->free_at[path] : now - CATCH_UP;
    uint64_t rate = (uint64_t)p->rates[path];
    if (!nbytes || !rate) return;
    p->free_at[path] = from + (int64_t)(((unsigned __int128)nbytes * 1000000000 + rate - 1) / rate);
}

/* A work that begins now moves so many bytes. */
static inline void pace_charge(Pace *p, int64_t now, uint64_t in, uint64_t out, uint64_t memory) {
    if (!at_work(&p->neighbours, now)) return;
    put_off(p, IN, now, in);
    put_off(p, OUT, now, out);
    put_off(p, MEMORY, now, memory);
}

#endif
