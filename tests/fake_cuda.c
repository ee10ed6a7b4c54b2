/* A device that has no hardware, for tests: the functions of libcuda that the launch loop calls, and graphs that take a given
 * time. A thread for each stream runs what is on it, in order, as the device would: it reads the copy table when the graph
 * begins, counts the inference when it ends, and its "engine" calls a function, if there is one, or adds 1 to the first
 * input's bytes. A function that returns another number than 0 has failed: so does everything after it on the stream.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define QUEUE 256
#define NOT_READY 600
#define FAILURE 700

typedef struct {
    volatile int64_t duration;
    uint64_t *tables;
    uint32_t length, rows, inputs;
    uint64_t *state; /* how many inferences the device has counted */
    int (*call)(const void *input, uint64_t nbytes);
} Graph;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t wanted, done; /* recorded how often; reached how often */
    int result;
} Event;

enum { LAUNCH, RECORD, WRITE };

typedef struct {
    int kind;
    void *object;
    uint64_t value;
} Step;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Step steps[QUEUE];
    uint64_t put, done;
    int ends, result;
} Stream;

static volatile int64_t launches_until_failure = INT64_MAX;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int run_graph(Graph *graph) {
    int64_t end = now_ns() + graph->duration;
    const uint64_t *table = graph->tables + *graph->state % graph->length * graph->rows * 3;
    uint64_t rows[16][3];
    memcpy(rows, table, sizeof(uint64_t) * 3 * graph->rows);
    for (uint32_t i = 0; i < graph->inputs; i++) memcpy((void *)rows[i][1], (void *)rows[i][0], rows[i][2]);
    struct timespec until = {.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    if (graph->duration > 100000) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
    while (now_ns() < end) {
    }
    int result = graph->call ? graph->call((void *)rows[0][1], rows[0][2]) : 0, add = !graph->call;
    const unsigned char *input = (const unsigned char *)rows[0][1];
    for (uint32_t i = graph->inputs; i < graph->rows; i++) {
        unsigned char *output = (unsigned char *)rows[i][1];
        for (uint64_t at = 0; at < rows[i][2]; at++) output[at] = (unsigned char)(input[at % rows[0][2]] + add);
    }
    ++*graph->state;
    return result;
}

static void run_step(Stream *stream, Step *step) {
    if (step->kind == LAUNCH) {
        if (!stream->result) stream->result = run_graph(step->object);
    } else if (step->kind == WRITE) {
        __atomic_store_n((uint32_t *)step->object, (uint32_t)step->value, __ATOMIC_RELEASE);
    } else {
        Event *event = step->object;
        pthread_mutex_lock(&event->lock);
        event->done = step->value;
        event->result = stream->result;
        pthread_cond_broadcast(&event->changed);
        pthread_mutex_unlock(&event->lock);
    }
}

static void *run_stream(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->done == stream->put && !stream->ends) pthread_cond_wait(&stream->changed, &stream->lock);
        if (stream->done == stream->put) break;
        Step step = stream->steps[stream->done % QUEUE];
        pthread_mutex_unlock(&stream->lock);
        run_step(stream, &step);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static int put(Stream *stream, int kind, void *object, uint64_t value) {
    pthread_mutex_lock(&stream->lock);
    while (stream->put - stream->done == QUEUE) pthread_cond_wait(&stream->changed, &stream->lock);
    stream->steps[stream->put++ % QUEUE] = (Step){kind, object, value};
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return 0;
}

void *fake_stream(void) {
    Stream *stream = calloc(1, sizeof *stream);
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, run_stream, stream);
    return stream;
}

void fake_stream_close(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->ends = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
}

void *fake_graph(int64_t duration, uint64_t *tables, uint32_t length, uint32_t rows, uint32_t inputs, uint64_t *state,
                 int (*call)(const void *, uint64_t)) {
    Graph *graph = malloc(sizeof *graph);
    *graph = (Graph){duration, tables, length, rows, inputs, state, call};
    return graph;
}

/* From the next launch on the graph takes so many nanoseconds. */
void fake_take(Graph *graph, int64_t duration) { graph->duration = duration; }

void fake_graph_close(Graph *graph) { free(graph); }

/* Let the launch after so many fail. */
void fake_fail_after(int64_t launches) { launches_until_failure = launches; }

int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }

int cuGraphLaunch(void *graph, void *stream) {
    if (launches_until_failure-- <= 0) return FAILURE;
    return put(stream, LAUNCH, graph, 0);
}

int cuEventCreate(void **made, unsigned flags) {
    (void)flags;
    Event *event = calloc(1, sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    *made = event;
    return 0;
}

int cuEventDestroy_v2(Event *event) {
    free(event);
    return 0;
}

int cuEventRecord(Event *event, Stream *stream) {
    pthread_mutex_lock(&event->lock);
    uint64_t number = ++event->wanted;
    pthread_mutex_unlock(&event->lock);
    return put(stream, RECORD, event, number);
}

int cuEventQuery(Event *event) {
    pthread_mutex_lock(&event->lock);
    int result = event->done >= event->wanted ? event->result : NOT_READY;
    pthread_mutex_unlock(&event->lock);
    return result;
}

int cuEventSynchronize(Event *event) {
    pthread_mutex_lock(&event->lock);
    while (event->done < event->wanted) pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
    return 0;
}

int cuStreamQuery(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    int done = stream->done == stream->put;
    pthread_mutex_unlock(&stream->lock);
    return done ? 0 : NOT_READY;
}

int cuStreamWriteValue32_v2(Stream *stream, uint64_t address, uint32_t value, unsigned flags) {
    (void)flags;
    return put(stream, WRITE, (void *)address, value);
}

int cuMemHostAlloc(void **made, size_t nbytes, unsigned flags) {
    (void)flags;
    *made = calloc(1, nbytes);
    return 0;
}

int cuMemFreeHost(void *memory) {
    free(memory);
    return 0;
}
