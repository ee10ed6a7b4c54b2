/* The launch loop: tickets of one link in, completions out, with no interpreter between.
 *
 * A thread calls `loop_run`, which returns when it is stopped, when a ticket comes that it knows no graph for, or when the
 * driver reports an error. It launches captured graphs, whose first and last kernel copy inputs and outputs by a ring of
 * tables in pinned memory (engines/tensorrt/copies.py): one table a launch, counted here as the device counts.
 */
#include "link.h"

#define MOST_TENSORS 16
#define MOST_AHEAD 16
#define CUDA_NOT_READY 600

enum { SPIN, NAP, BLOCK };       /* how to wait for a work */
enum { EVENT, WORD };            /* how a work reports its end: an event, or a word that the stream writes to host memory */
enum { STOPPED = 1, UNKNOWN, FAILED }; /* why loop_run returned */

typedef struct {
    int (*set_context)(void *);
    int (*launch)(void *, void *);
    int (*record)(void *, void *);
    int (*query)(void *);
    int (*synchronize)(void *);
    int (*query_stream)(void *);
    int (*write_word)(void *, uint64_t, uint32_t, unsigned);
} Cuda;

typedef struct {
    uint64_t *tables; /* rows of source, target and size; `length` tables of `rows` rows */
    uint32_t length, rows;
    uint64_t counted; /* inferences so far, on the host and on the device */
} Copies;

typedef struct {
    const unsigned char *body, *done; /* what a ticket says behind its head; what its completion says */
    uint32_t length, done_length;
    void *graph;
    Copies *copies;
    uint32_t inputs, rows;
    uint64_t offset[MOST_TENSORS], device[MOST_TENSORS], nbytes[MOST_TENSORS]; /* inputs, then outputs; offsets in the slot */
    uint64_t needed;   /* bytes of a slot that the outputs end at */
    int64_t expected;  /* nanoseconds that a work takes, as of late */
} Entry;

typedef struct {
    Entry *entry;
    uint32_t slot, word;
    int64_t began;
} Flight;

typedef struct {
    Link link;
    Cuda cuda;
    void *context, *stream;
    Entry *entries;
    uint32_t entry_count, ahead, wait, signal;
    void *events[MOST_AHEAD];
    volatile uint32_t *words; /* MOST_AHEAD of them in pinned memory; the device has them at `device_words` */
    uint64_t device_words;
    int64_t spin, idle_spin, bundle, margin; /* nanoseconds */
    const unsigned char *expired;            /* the completion of a ticket whose deadline has passed */
    const unsigned char *cancelled;
    uint32_t expired_length, cancelled_length;
    volatile uint64_t *cancelled_serials; /* by slot, 0 for none */
    volatile int32_t stop;
    /* Counts that continue where the previous reader and writer of the rings stopped. */
    uint64_t read, put, unread;
    /* Results. */
    int32_t error;
    uint64_t launched, finished, refused, sleeps, queries;
    /* The loop's own. */
    Flight flights[MOST_AHEAD];
    uint64_t signalled, rung;
    int64_t rung_at, last_end, last_took;
} Loop;

static int waiting(const Loop *l) { return __atomic_load_n(l->link.total_put, __ATOMIC_ACQUIRE) != (uint32_t)l->read; }

static uint64_t in_flight(const Loop *l) { return l->launched - l->finished; }

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

static Entry *find(Loop *l, const unsigned char *body, uint32_t length) {
    for (uint32_t i = 0; i < l->entry_count; i++) {
        Entry *entry = &l->entries[i];
        if (entry->length == length && !memcmp(entry->body, body, length)) return entry;
    }
    return NULL;
}

/* Write the table of the next launch, launch, and have the stream report the end. Returns a CUresult. */
static int launch(Loop *l, Entry *entry, uint64_t address, uint32_t slot) {
    Copies *copies = entry->copies;
    uint64_t *row = copies->tables + copies->counted % copies->length * copies->rows * 3;
    uint32_t at = l->launched % MOST_AHEAD, word = (uint32_t)l->launched + 1;
    for (uint32_t i = 0; i < entry->rows; i++, row += 3) {
        uint64_t host = address + entry->offset[i];
        row[0] = i < entry->inputs ? host : entry->device[i];
        row[1] = i < entry->inputs ? entry->device[i] : host;
        row[2] = entry->nbytes[i];
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    l->flights[at] = (Flight){entry, slot, word, now_ns()};
    int error = l->cuda.launch(entry->graph, l->stream);
    if (error) return error;
    copies->counted++;
    l->launched++;
    return l->signal == WORD ? l->cuda.write_word(l->stream, l->device_words + 4 * at, word, 0)
                             : l->cuda.record(l->events[at], l->stream);
}

/* Whether the oldest work has ended. */
static int ended(Loop *l) {
    uint32_t at = l->finished % MOST_AHEAD;
    l->queries++;
    if (l->signal == WORD) {
        if (l->words[at] == l->flights[at].word) {
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            return 1;
        }
        if (l->queries % 4096 == 0) { /* A work that failed never writes its word. */
            int result = l->cuda.query_stream(l->stream);
            if (result && result != CUDA_NOT_READY) l->error = result;
        }
        return 0;
    }
    int result = l->cuda.query(l->events[at]);
    if (result && result != CUDA_NOT_READY) l->error = result;
    return !result;
}

/* Take the next ticket: launch it, or report it as failed. Returns 0 if it has to be left to others, or could not be run. */
static int start(Loop *l) {
    uint32_t slot = l->link.tickets[l->read % l->link.count];
    unsigned char *page = ticket_page(&l->link, slot);
    TicketHead head;
    memcpy(&head, page, sizeof head);
    int64_t now = now_ns();
    if (l->cancelled_serials && l->cancelled_serials[slot] == head.serial) {
        l->read++, l->refused++;
        complete(l, slot, l->cancelled, l->cancelled_length, now, now);
        return 1;
    }
    if ((double)now * 1e-9 > head.deadline) {
        l->read++, l->refused++;
        complete(l, slot, l->expired, l->expired_length, now, now);
        return 1;
    }
    Entry *entry = head.length <= l->link.page - sizeof head ? find(l, page + sizeof head, head.length) : NULL;
    if (!entry || head.start % 64 || head.start > l->link.memory_size || head.capacity > l->link.memory_size - head.start ||
        entry->needed > head.capacity)
        return 0;
    l->read++;
    l->error = launch(l, entry, l->link.memory + head.start, slot);
    return !l->error;
}

static void finish(Loop *l) {
    Flight *flight = &l->flights[l->finished % MOST_AHEAD];
    int64_t now = now_ns(), began = flight->began > l->last_end ? flight->began : l->last_end;
    Entry *entry = flight->entry;
    l->last_end = now;
    l->last_took = now - began;
    /* Rather too short than too long, so that a nap ends before the work does. */
    if (!entry->expected) entry->expected = l->last_took;
    entry->expected += (l->last_took - entry->expected) / (l->last_took < entry->expected ? 2 : 16);
    l->finished++;
    complete(l, flight->slot, entry->done, entry->done_length, began, now);
}

/* Let time pass while the oldest work runs: briefly, until a ticket comes, or until the work's end is near. */
static void pass_time(Loop *l, int64_t since, int takes) {
    Flight *flight = &l->flights[l->finished % MOST_AHEAD];
    int64_t now = now_ns(), left;
    if (l->wait == NAP) {
        left = (flight->began > l->last_end ? flight->began : l->last_end) + flight->entry->expected - l->margin - now;
        if (left < 5000 && now - since > flight->entry->expected + l->spin) left = 20000; /* It is late: look now and then. */
        if (left >= 5000) {
            l->sleeps++;
            if (wait_event(takes ? l->link.ticket_event : -1, left)) l->signalled += read_event(l->link.ticket_event);
            return;
        }
    } else if (l->wait == BLOCK && l->signal == EVENT && now - since > l->spin) {
        l->sleeps++;
        l->error = l->cuda.synchronize(l->events[l->finished % MOST_AHEAD]);
        return;
    }
    relax();
}

/* Wait for the oldest work; returns early if a ticket may be taken meanwhile. */
static void wait_oldest(Loop *l, int takes) {
    int64_t since = now_ns();
    if (l->last_took > l->bundle || since - l->rung_at > l->bundle) { /* Earlier completions must not wait for a long work. */
        ring(l);
        l->rung_at = since;
    }
    while (!ended(l) && !l->error) {
        if (takes && waiting(l)) return;
        pass_time(l, since, takes);
    }
    if (!l->error) finish(l);
}

/* Nothing is in flight: wait for tickets. */
static void rest(Loop *l) {
    for (int64_t until = now_ns() + l->idle_spin; l->idle_spin && now_ns() < until; relax())
        if (waiting(l) || l->stop) return;
    l->sleeps++;
    l->signalled += read_event(l->link.ticket_event);
}

/* Serve until `stop` is set and the ticket eventfd is written. Afterwards the counts are those of the next reader:
 * `unread` tickets were announced and not taken. Nothing is in flight then, unless the driver failed. */
int loop_run(Loop *l) {
    int unknown = 0;
    l->signalled = l->unread;
    l->rung = l->put;
    l->launched = l->finished = l->refused = l->sleeps = l->queries = 0;
    l->rung_at = l->last_end = l->last_took = 0;
    uint64_t first = l->read;
    sleep_precisely();
    l->error = l->cuda.set_context(l->context);
    for (uint32_t i = 0; l->words && i < MOST_AHEAD; i++) l->words[i] = 0;
    while (!l->error) {
        while (!l->stop && !unknown && in_flight(l) < l->ahead && waiting(l)) {
            if (start(l)) continue;
            unknown = !l->error;
            break;
        }
        if (l->error) break;
        int takes = !l->stop && !unknown && in_flight(l) < l->ahead;
        if (in_flight(l)) {
            wait_oldest(l, takes);
            continue;
        }
        ring(l);
        if (l->stop || unknown) break;
        rest(l);
    }
    ring(l);
    while (l->signalled < l->read - first) l->signalled += read_event(l->link.ticket_event); /* About to be written. */
    l->unread = l->signalled - (l->read - first);
    return l->error ? FAILED : unknown ? UNKNOWN : STOPPED;
}

/* The engine without a link: launch back to back, `ahead` works at a time, for `duration` nanoseconds.
 * Work n uses the memory of slot n % ahead, slots of `capacity` bytes. Writes up to `most` latencies, in nanoseconds from
 * launch to the end seen here; returns how many works ended in time. */
uint64_t loop_bare(Loop *l, Entry *entry, uint64_t capacity, int64_t duration, int64_t *latencies, uint64_t most) {
    l->launched = l->finished = l->queries = 0;
    l->error = l->cuda.set_context(l->context);
    for (uint32_t i = 0; l->words && i < MOST_AHEAD; i++) l->words[i] = 0;
    uint64_t counted = 0;
    int64_t until = now_ns() + duration;
    while (!l->error && (in_flight(l) || now_ns() < until)) {
        while (!l->error && in_flight(l) < l->ahead && now_ns() < until)
            l->error = launch(l, entry, l->link.memory + l->launched % l->ahead * capacity, 0);
        while (!l->error && in_flight(l) && !ended(l)) relax();
        if (l->error || !in_flight(l)) continue;
        int64_t now = now_ns();
        if (now < until && counted < most) latencies[counted] = now - l->flights[l->finished % MOST_AHEAD].began;
        counted += now < until;
        l->finished++;
    }
    return counted;
}

uint64_t loop_size(void) { return sizeof(Loop); }
uint64_t entry_size(void) { return sizeof(Entry); }
