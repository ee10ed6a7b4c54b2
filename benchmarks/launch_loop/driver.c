/* The HTTP side of a link, played by a process of its own: tickets out, completions in, and how long each took. */
#include "../../server/launch_loop/link.h"

#define PATIENCE 20000000000ll /* nanoseconds without a completion, after which a phase is given up */

typedef struct {
    Link link;
    const unsigned char *body;
    uint32_t length, outstanding; /* tickets outstanding; with a rate, the most that may be */
    uint64_t capacity;            /* slot n has `capacity` bytes from n * capacity on */
    double rate;                  /* tickets a second, whatever was answered; 0: the next as soon as one was answered */
    int64_t duration;
    uint64_t serial, put, read; /* counts that continue where the previous phase stopped */
    int64_t *latencies;         /* nanoseconds from when each was due to when its completion was seen */
    uint64_t most;
    unsigned char *first; /* a page: the completion that was seen first */
    /* Results: completions, those seen within the duration, and those that differ from the first. */
    uint64_t taken, counted, differing;
    int32_t lost;
    int64_t *due; /* by slot */
} Job;

static void put(Job *j, uint32_t slot, int64_t due) {
    unsigned char *page = ticket_page(&j->link, slot);
    TicketHead head = {++j->serial, __builtin_inf(), j->capacity, slot * j->capacity, 0, j->length};
    memcpy(page, &head, sizeof head);
    memcpy(page + sizeof head, j->body, j->length);
    j->due[slot] = due;
    j->link.tickets[j->put % j->link.count] = slot;
    j->put++;
}

static void send(Job *j, uint64_t count) {
    if (!count) return;
    __atomic_store_n(j->link.total_put, (uint32_t)j->put, __ATOMIC_RELEASE);
    write_event(j->link.ticket_event, count);
}

/* Take the next completion; returns its slot. */
static uint32_t take(Job *j, int64_t now, int64_t until) {
    uint32_t slot = j->link.completions[j->read % j->link.count];
    unsigned char *page = completion_page(&j->link, slot);
    DoneHead head, first;
    memcpy(&head, page, sizeof head);
    if (!j->taken) memcpy(j->first, page, sizeof head + head.length);
    memcpy(&first, j->first, sizeof first);
    j->differing += head.length != first.length || memcmp(page + sizeof head, j->first + sizeof head, head.length);
    if (now < until) {
        if (j->counted < j->most) j->latencies[j->counted] = now - j->due[slot];
        j->counted++;
    }
    j->read++;
    j->taken++;
    return slot;
}

/* How many completions are announced. */
static uint32_t announced(const Job *j) {
    int64_t count = 0;
    add_event(j->link.completion_event, &count);
    return (uint32_t)count;
}

static void closed_loop(Job *j) {
    int64_t now = now_ns(), until = now + j->duration;
    for (uint32_t slot = 0; slot < j->outstanding; slot++) put(j, slot, now);
    send(j, j->outstanding);
    for (uint64_t flying = j->outstanding; flying;) {
        if (!wait_event(j->link.completion_event, PATIENCE)) {
            j->lost = 1;
            return;
        }
        uint32_t count = announced(j), again = 0;
        now = now_ns();
        for (uint32_t i = 0; i < count; i++) {
            uint32_t slot = take(j, now, until);
            if (now < until)
                put(j, slot, now), again++;
            else
                flying--;
        }
        send(j, again);
    }
}

static void open_loop(Job *j, uint32_t *idle) {
    int64_t now = now_ns(), start = now, last_seen = now;
    uint64_t sent = 0, flying = 0, all = (uint64_t)(j->rate * (double)j->duration * 1e-9);
    uint32_t free_slots = j->outstanding;
    for (uint32_t slot = 0; slot < free_slots; slot++) idle[slot] = slot;
    while (sent < all || flying) {
        int64_t due = start + (int64_t)((double)sent / j->rate * 1e9);
        if (sent < all && free_slots && now >= due) {
            put(j, idle[--free_slots], due);
            send(j, 1);
            sent++, flying++;
        }
        int64_t left = sent < all && free_slots ? due - now - 60000 : PATIENCE;
        if (left > 0) wait_event(j->link.completion_event, left);
        uint32_t count = announced(j);
        now = now_ns();
        for (uint32_t i = 0; i < count; i++, flying--) idle[free_slots++] = take(j, now, INT64_MAX);
        if (count || !flying) last_seen = now;
        if (now - last_seen > PATIENCE) {
            j->lost = 1;
            return;
        }
    }
}

/* Run one phase; `idle` has room for a number of each slot. */
void drive(Job *j, uint32_t *idle) {
    j->taken = j->counted = j->differing = 0;
    j->lost = 0;
    set_timer_slack(1);
    if (j->rate > 0)
        open_loop(j, idle);
    else
        closed_loop(j);
}

uint64_t job_size(void) { return sizeof(Job); }
