/* Whether other tenants of the device are at work: a rule of server/workers/fence.py. All times are nanoseconds. */
#ifndef NEIGHBOURS_H
#define NEIGHBOURS_H

#include "stretching.h"

typedef struct {
    uint32_t count;
    volatile uint64_t **words; /* `count` of them: of each of their HTTP processes */
} Neighbours;

static inline int at_work(const Neighbours *n, int64_t now) {
    uint64_t since = now > SETTLED ? (uint64_t)(now - SETTLED) : 0;
    for (uint32_t i = 0; i < n->count; i++)
        if (n->words[i][OPEN] || n->words[i][ENDED] > since) return 1;
    return 0;
}

#endif
