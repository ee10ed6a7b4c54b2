/* The launch loop: tickets of one link in, completions out, with no interpreter between. See loop.py.
 *
 * A thread of the worker calls `launch_loop_run`, which serves until it is woken, until a ticket comes that it knows no graph
 * for, or until the driver reports an error; then it waits for what is in flight and returns. It takes no lock, and shares no
 * memory with the loop of another tenant. What the driver's functions lock is not documented. All tenants of a device are in
 * one context, so their calls may wait for each other there, as the worker's do: four tenants launched 154,060 graphs a second
 * together (docs/lab/2026-11-26-launch-loop.md), so a call waits for microseconds.
 *
 * The HTTP side can write to the whole link. Nothing that is read there is used as an index or an address unchecked, and what
 * is checked is copied before.
 */
#include "link.h"
#include "stretching.h"
#include "fence.h"
#include "pacing.h"

#define MOST_TENSORS 32
#define MOST_AHEAD 16 /* as many as a ring of copy tables has, so that no table is written while it may still be read */

/* Nanoseconds. A thread that waits for a work sleeps until MARGIN before its expected end, then queries without a pause until
 * SPIN after it, and then sleeps LATE and more between two queries. So it spins for at most 90 us a work, however wrong the
 * expectation is, and a core is not lost to a work that never ends. How long a work took that ended during the sleep is not
 * known: the next is expected to take MARGIN less, then twice as much less each time, until an end is seen. On an H100 sleeping
 * cost 7 us of p50 for works of 250 and 400 us, and took 51 us of CPU for each where spinning took 248 and more. */
#define MARGIN 40000
#define SPIN 50000
#define SHORTEST_SLEEP 5000
#define LATE 20000
#define LONGEST_SLEEP 1000000

enum { HOME, WIDE, NARROW }; /* a placement of the worker */

enum { WOKEN = 1, UNKNOWN, FAILED }; /* why the loop returned */

typedef struct Entry Entry;
struct Entry {
    int (*launch)(void *, void *);
    int (*record)(void *, void *);
    int (*query)(void *);
    void *graph, *stream;
    void **events;    /* `length` of them */
    uint64_t *tables; /* `length` tables of `rows` rows of source, target and size */
    uint64_t *counted, *launched;
    const unsigned char *body, *done; /* what a ticket says behind its head; what its completion says */
    uint64_t hash;
    uint32_t body_length, done_length, length, rows, inputs;
    int32_t pending;                                                /* what `query` returns before the end */
    uint64_t offset[MOST_TENSORS], address[MOST_TENSORS], nbytes[MOST_TENSORS]; /* inputs, then outputs; offsets in the slot */
    uint64_t moved_in, moved_out; /* bytes over PCIe */
    uint64_t needed;  /* bytes of a slot that the outputs end at */
    int64_t expected; /* nanoseconds that a work takes, as of late */
    int64_t less;     /* by how much less to expect, if the next work has ended before it is looked at */
    volatile uint64_t *used; /* nanoseconds and works so far, for the account; NULL if the device counts them */
    Entry *wide, *narrow; /* the same on the wide and the narrow placement; NULL without one */
    Times *times;         /* of home and wide */
    Demand *demand;       /* of the model; NULL if it has no executor on the narrow placement */
    int32_t placement;
};

typedef struct {
    Entry *entry;
    void *event;
    uint64_t serial;
    int64_t began;
    uint32_t slot;
} Flight;

typedef struct {
    Link link;
    Entry *entries;
    Wide *wide;   /* NULL while nothing goes to the wide partition */
    Fence *fence; /* NULL while nothing goes to the narrow placement */
    Pace *pace;   /* NULL without a share that works wait for */
    uint32_t entry_count;
    int64_t bundle; /* for how many nanoseconds completions may be collected while works follow each other without a sleep */
    const unsigned char *expired, *cancelled; /* completions of tickets whose deadline has passed, or that were cancelled */
    uint32_t expired_length, cancelled_length;
    volatile uint64_t *cancelled_serials; /* by slot, 0 for none */
    volatile uint64_t wakes; /* changed by other threads, to have the loop return */
    volatile uint64_t oldest; /* the serial of the oldest work in flight, 0 for none; for other threads */
    uint64_t seen;            /* the value of `wakes` that is answered already */
    /* Where the readers and writers of the rings continue, which are Python's otherwise. */
    uint64_t read, put;
    int64_t unread; /* tickets announced and not taken; less than 0 if some were taken before they were announced */
    /* Results. `error` is what a function returned. `refused`: the flight at `launched` could not be launched. `lost`: the
     * flights from `finished` to `launched` cannot be waited for. */
    int32_t error, refused, lost;
    uint64_t launched, finished;
    /* The loop's own. */
    Flight flights[MOST_AHEAD];
    uint64_t rung;
    int64_t rung_at, last_end, last_took, looked;
    int32_t unknown;
    int32_t held; /* the next ticket waits until nothing is in flight, to go to another placement then */
    int64_t look_at; /* the next ticket waits for its tenant's shares, and is looked at again then; 0 if it does not */
} Loop;

static int waiting(const Loop *l) { return __atomic_load_n(l->link.total_put, __ATOMIC_ACQUIRE) != (uint32_t)l->read; }

static int woken(const Loop *l) { return __atomic_load_n(&l->wakes, __ATOMIC_ACQUIRE) != l->seen; }

static int goes_on(const Loop *l) { return !l->unknown && !l->error && !woken(l); }

static uint64_t in_flight(const Loop *l) { return l->launched - l->finished; }

static Flight *oldest(Loop *l) { return &l->flights[l->finished % MOST_AHEAD]; }

/* How long the next ticket waits for its tenant's shares, until the next look. */
static int64_t paced_for(const Loop *l) {
    int64_t left = l->look_at ? l->look_at - now_ns() : 0;
    return left > 0 ? left : 0;
}

/* Whether the next ticket may be started now. A work on the wide partition is alone in flight. */
static int may_start(Loop *l) {
    return goes_on(l) && !paced_for(l) && in_flight(l) < MOST_AHEAD &&
           !(in_flight(l) && (l->held || oldest(l)->entry->placement == WIDE));
}

static int64_t began(Loop *l) { return oldest(l)->began > l->last_end ? oldest(l)->began : l->last_end; }

static void publish_oldest(Loop *l) {
    __atomic_store_n(&l->oldest, in_flight(l) ? oldest(l)->serial : 0, __ATOMIC_RELEASE);
}

/* Send the completions that were put. */
static void ring(Loop *l) {
    uint64_t count = l->put - l->rung;
    if (!count) return;
    l->rung = l->put;
    write_event(l->link.completion_event, count);
}

static void complete(Loop *l, uint32_t slot, const unsigned char *body, uint32_t length, int64_t began, int64_t ended) {
    unsigned char *page = completion_page(&l->link, slot);
    DoneHead head = {began, ended, length};
    memcpy(page, &head, sizeof head);
    memcpy(page + sizeof head, body, length);
    l->link.completions[l->put % l->link.count] = slot;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    l->put++;
}

/* FNV-1a. */
uint64_t launch_loop_hash(const unsigned char *body, uint32_t length) {
    uint64_t hash = 14695981039346656037ull;
    for (uint32_t i = 0; i < length; i++) hash = (hash ^ body[i]) * 1099511628211ull;
    return hash;
}

static Entry *find(Loop *l, const unsigned char *body, uint32_t length) {
    uint64_t hash = launch_loop_hash(body, length);
    for (uint32_t i = 0; i < l->entry_count; i++) {
        Entry *entry = &l->entries[i];
        if (entry->hash == hash && entry->body_length == length && !memcmp(entry->body, body, length)) return entry;
    }
    return NULL;
}

/* The placement that a work goes to: narrow, if the tenant's fence asks for that, or else wide, or home. With `held` the ticket
 * waits until those in flight elsewhere have ended: the HTTP side hands over the next one before that, so otherwise nothing would
 * ever go elsewhere under load. NULL, and `unknown`, if it goes where it has no graph yet: then it is for Python. */
static Entry *choose(Loop *l, Entry *entry, int64_t now) {
    Entry *to = entry;
    int why = DECISIONS;
    if (l->fence && entry->demand && goes_narrow(l->fence, entry->demand, now)) {
        to = entry->narrow;
        l->unknown = !to;
    } else if (l->wide && entry->wide) {
        Wide *b = l->wide;
        int fenced = l->fence && entry->demand && stays_home(l->fence, entry->demand, b->home, b->wide, now);
        why = fenced ? FENCED : decide(entry->times, now, b->limit, b->home, b->wide, 0, rested_since(b));
        if (why == WENT_WIDE) to = entry->wide;
    }
    l->held = to && in_flight(l) && oldest(l)->entry->placement != to->placement;
    if (!l->held && why != WENT_WIDE && why != DECISIONS) l->wide->stayed[why]++;
    return to;
}

static void begin_wide(Wide *b) {
    mark(b, 1);
    b->launches++;
    b->ended_before = ends(b);
}

/* A work has ended on one of the placements: learn what it took, unless a lender has interfered. */
static void learn(Loop *l, const Entry *entry, int64_t now) {
    Wide *b = l->wide;
    if (entry->placement != WIDE) {
        if (entry->demand) learn_time(entry->placement == NARROW ? &entry->demand->narrow : &entry->demand->home, l->last_took);
        if (b && entry->wide && entry->placement == HOME) learn_home(entry->times, l->last_took);
        return;
    }
    mark(b, 0);
    if (rested_since(b) < 0 || ends(b) != b->ended_before)
        b->returns++;
    else
        learn_wide(entry->times, l->last_took, b->limit, now);
}

/* Write the table of the next launch, launch, and have the stream report the end. */
static void launch(Loop *l, Entry *entry, uint64_t address, uint32_t slot, uint64_t serial) {
    uint64_t at = *entry->counted % entry->length, *row = entry->tables + at * entry->rows * 3;
    for (uint32_t i = 0; i < entry->rows; i++, row += 3) {
        uint64_t host = address + entry->offset[i];
        row[0] = i < entry->inputs ? host : entry->address[i];
        row[1] = i < entry->inputs ? entry->address[i] : host;
        row[2] = entry->nbytes[i];
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (entry->placement == WIDE) begin_wide(l->wide);
    int64_t now = now_ns();
    if (l->pace) {
        int64_t moved = entry->placement == NARROW ? entry->demand->moved : 0;
        pace_charge(l->pace, now, entry->moved_in, entry->moved_out, (uint64_t)(moved < 0 ? -moved : moved));
    }
    l->flights[l->launched % MOST_AHEAD] = (Flight){entry, entry->events[at], serial, now, slot};
    if ((l->error = entry->launch(entry->graph, entry->stream))) {
        l->refused = 1;
        return;
    }
    ++*entry->counted;
    ++*entry->launched;
    l->launched++;
    if (entry->placement == NARROW) ++*l->fence->launches;
    publish_oldest(l);
    if ((l->error = entry->record(entry->events[at], entry->stream))) l->lost = 1;
}

/* Whether the next ticket has to wait for its tenant's shares. Sets when to look again. */
static int waits(Loop *l, int64_t now) {
    int64_t left = l->pace ? pace_wait(l->pace, now) : 0;
    if (left && !l->look_at && pcie_left(l->pace, now) > 0) l->pace->waits++;
    l->look_at = left ? now + left : 0;
    return left != 0;
}

/* Take the next ticket: launch it, report it as failed, or leave it to Python. */
static void start(Loop *l) {
    uint32_t slot = l->link.tickets[l->read % l->link.count];
    if (slot >= l->link.count || *l->link.total_put - (uint32_t)l->read > l->link.count) {
        l->unknown = 1;
        return;
    }
    unsigned char *page = ticket_page(&l->link, slot);
    TicketHead head;
    memcpy(&head, page, sizeof head);
    int64_t now = now_ns();
    Entry *entry = head.length <= l->link.page - sizeof head ? find(l, page + sizeof head, head.length) : NULL;
    if (!entry || head.after || head.start % 64 || head.start > l->link.memory_size ||
        head.capacity > l->link.memory_size - head.start || entry->needed > head.capacity) {
        l->unknown = 1;
        return;
    }
    int cancelled = l->cancelled_serials[slot] == head.serial, expired = (double)now * 1e-9 > head.deadline;
    if (cancelled || expired)
        l->look_at = 0;
    else if (waits(l, now) || !(entry = choose(l, entry, now)) || l->held)
        return;
    l->read++;
    if (cancelled)
        complete(l, slot, l->cancelled, l->cancelled_length, now, now);
    else if (expired)
        complete(l, slot, l->expired, l->expired_length, now, now);
    else
        launch(l, entry, l->link.memory + head.start, slot, head.serial);
}

/* Learn what to expect from a work that ended between two looks, so many nanoseconds after it began: rather too short than too
 * long, so that a sleep ends before the work does. */
static void expect(Entry *entry, int64_t looked, int64_t took) {
    if (!entry->expected) {
        entry->expected = took;
        entry->less = MARGIN;
    } else if (took - looked > MARGIN && looked < entry->expected) {
        int64_t half = entry->expected / 2, less = entry->less < half ? entry->less : half;
        entry->expected -= less;
        entry->less = 2 * less;
    } else {
        entry->less = MARGIN;
        entry->expected += (took - entry->expected) / (took < entry->expected ? 2 : 16);
    }
}

static void finish(Loop *l) {
    Flight *flight = oldest(l);
    int64_t now = now_ns(), since = began(l);
    Entry *entry = flight->entry;
    l->last_end = now;
    l->last_took = now - since;
    expect(entry, l->looked - since, l->last_took);
    if (entry->used) {
        entry->used[0] += (uint64_t)l->last_took;
        entry->used[1]++;
    }
    l->finished++;
    l->held = l->held && in_flight(l);
    publish_oldest(l);
    learn(l, entry, now);
    complete(l, flight->slot, entry->done, entry->done_length, since, now);
}

/* How long to sleep while the oldest work runs; 0 for not at all. */
static int64_t sleep_for(Loop *l, int64_t since) {
    int64_t now = now_ns(), expected = oldest(l)->entry->expected, left = began(l) + expected - MARGIN - now;
    int64_t late = now - since - expected - SPIN;
    if (left >= SHORTEST_SLEEP) return left;
    if (late < 0) return 0;
    return late / 8 < LATE ? LATE : late / 8 > LONGEST_SLEEP ? LONGEST_SLEEP : late / 8;
}

/* Wait for the oldest work; returns early if a ticket may be taken meanwhile. Does not return early when woken: nothing may be
 * in flight when the loop returns. */
static void wait_oldest(Loop *l) {
    int64_t since = now_ns(), ns;
    Flight *flight = oldest(l);
    if (since - l->rung_at > l->bundle) {
        ring(l);
        l->rung_at = since;
    }
    for (;;) {
        int64_t now = now_ns();
        int result = flight->entry->query(flight->event), takes = may_start(l);
        if (!result) return finish(l);
        if (result != flight->entry->pending) {
            l->error = result;
            l->lost = 1;
            return;
        }
        l->looked = now;
        if (takes && waiting(l)) return;
        if (!(ns = sleep_for(l, since))) {
            relax();
            continue;
        }
        int64_t paced = paced_for(l);
        if (paced && paced < ns) ns = paced;
        ring(l); /* Earlier completions must not wait for a long work. */
        if (wait_event(takes ? l->link.ticket_event : -1, ns)) add_event(l->link.ticket_event, &l->unread);
    }
}

/* Add the tickets that were announced. Tickets are taken as they are put, so many may have been taken before they are counted here.
 * The HTTP side may announce what cannot be; then Python finds out. */
static void count_announced(Loop *l, uint64_t first) {
    add_event(l->link.ticket_event, &l->unread);
    if (l->unread - (int64_t)(l->read - first) > l->link.count) l->unknown = 1;
}

/* Serve until woken. Afterwards the counts are those of the next reader, and nothing is in flight unless the driver failed. */
int launch_loop_run(Loop *l) {
    uint64_t first = l->read;
    int slack = set_timer_slack(1);
    l->rung = l->put;
    l->launched = l->finished = l->oldest = 0;
    l->rung_at = l->last_end = l->last_took = 0;
    l->error = l->refused = l->lost = l->unknown = l->held = 0;
    l->look_at = 0;
    for (;;) {
        while (may_start(l) && waiting(l)) start(l);
        if (!waiting(l)) l->look_at = 0; /* The HTTP side may have taken back the ticket that waits. */
        if ((int64_t)(l->read - first) - l->unread > l->link.count) count_announced(l, first);
        if (in_flight(l) && !l->lost) {
            wait_oldest(l);
            continue;
        }
        ring(l);
        if (!goes_on(l)) break;
        listen_for(&l->link, &l->unread, l->look_at ? paced_for(l) : -1);
        count_announced(l, first);
    }
    count_announced(l, first);
    __atomic_store_n(&l->oldest, 0, __ATOMIC_RELEASE);
    if (l->wide) mark(l->wide, 0); /* Also after an error of the driver. */
    l->unread -= (int64_t)(l->read - first);
    set_timer_slack(slack);
    return l->error ? FAILED : l->unknown ? UNKNOWN : WOKEN;
}

/* For the test that compares these rules with Python's. */
int launch_loop_decide(const Times *t, int64_t now, int64_t limit, int64_t home, int64_t wide, int in_flight, int64_t since) {
    return decide(t, now, limit, home, wide, in_flight, since);
}
int launch_loop_goes_narrow(const Fence *f, const Demand *d, int64_t now) { return goes_narrow(f, d, now); }
int launch_loop_stays_home(const Fence *f, const Demand *d, int64_t units, int64_t wide, int64_t now) {
    return stays_home(f, d, units, wide, now);
}
void launch_loop_learn_time(int64_t *known, int64_t took) { learn_time(known, took); }
void launch_loop_learn_home(Times *t, int64_t took) { learn_home(t, took); }
void launch_loop_learn_wide(Times *t, int64_t took, int64_t limit, int64_t now) { learn_wide(t, took, limit, now); }
int64_t launch_loop_rested_since(const Wide *b) { return rested_since(b); }

int64_t launch_loop_pace_wait(const Pace *p, int64_t now) { return pace_wait(p, now); }
void launch_loop_pace_charge(Pace *p, int64_t now, uint64_t in, uint64_t out, uint64_t memory) {
    pace_charge(p, now, in, out, memory);
}

uint64_t launch_loop_pace_size(void) { return sizeof(Pace); }
uint64_t launch_loop_wide_size(void) { return sizeof(Wide); }
uint64_t launch_loop_fence_size(void) { return sizeof(Fence); }
uint64_t launch_loop_size(void) { return sizeof(Loop); }
uint64_t launch_loop_entry_size(void) { return sizeof(Entry); }
