/* Notes every call of the CUDA driver in this process, by CUPTI's callbacks, and samples the stacks of threads that use the CPU.
 *
 * trace_calls(path, least_ns, room): begin to note calls of at least least_ns; path is libcupti's. 0, or CUPTI's error.
 * trace_samples(microseconds, room): a stack of the thread that runs, for each so many microseconds of the process's CPU time.
 * trace_stop(): note nothing more.
 * Times are of CLOCK_MONOTONIC in nanoseconds, as time.perf_counter's. What does not fit the room is counted and left out.
 */
#define _GNU_SOURCE
#include "../../partitions/cuda/cupti.h"
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define DEPTH 40

struct call {
    uint64_t begin, end;
    const char *name;
    uint64_t thread;
};

struct sample {
    uint64_t when, thread, depth;
    void *stack[DEPTH];
};

static struct call *calls;
static struct sample *samples;
static uint64_t call_room, sample_room, least;
static atomic_uint_fast64_t call_count, sample_count;
static atomic_int on;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static uint64_t thread(void) { return (uint64_t)syscall(SYS_gettid); }

static void called(void *unused, int domain, uint32_t id, const struct callback_data *data) {
    (void)unused, (void)domain, (void)id;
    if (!on || !data->own) return;
    if (data->site == 0) {
        *data->own = now();
        return;
    }
    const uint64_t end = now();
    if (!*data->own || end - *data->own < least) return;
    const uint64_t at = atomic_fetch_add(&call_count, 1);
    if (at < call_room) calls[at] = (struct call){*data->own, end, data->name, thread()};
}

static void ticked(int signal) {
    (void)signal;
    if (!on) return;
    const uint64_t at = atomic_fetch_add(&sample_count, 1);
    if (at >= sample_room) return;
    samples[at].when = now();
    samples[at].thread = thread();
    samples[at].depth = (uint64_t)backtrace(samples[at].stack, DEPTH);
}

int trace_calls(const char *path, uint64_t least_ns, uint64_t room) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library) return -1;
    int (*subscribe)(void **, void *, void *) = (int (*)(void **, void *, void *))dlsym(library, "cuptiSubscribe");
    int (*enable)(uint32_t, void *, int) = (int (*)(uint32_t, void *, int))dlsym(library, "cuptiEnableDomain");
    if (!subscribe || !enable) return -2;
    calls = calloc(room, sizeof *calls), call_room = room, least = least_ns;
    if (!calls) return -3;
    void *subscriber = 0;
    int failed = subscribe(&subscriber, (void *)called, 0);
    if (!failed) failed = enable(1, subscriber, DRIVER_API);
    on = !failed;
    return failed;
}

int trace_samples(uint64_t microseconds, uint64_t room) {
    void *first[2];
    backtrace(first, 2); /* Loads the unwinder, which must not happen in the handler. */
    samples = calloc(room, sizeof *samples), sample_room = room;
    if (!samples) return -3;
    struct sigaction action = {.sa_handler = ticked, .sa_flags = SA_RESTART};
    const struct timeval every = {0, (suseconds_t)microseconds};
    const struct itimerval timer = {every, every};
    on = 1;
    return sigaction(SIGPROF, &action, 0) || setitimer(ITIMER_PROF, &timer, 0);
}

void trace_stop(void) {
    const struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_PROF, &never, 0);
    on = 0;
}

uint64_t trace_call_count(void) { return call_count < call_room ? call_count : call_room; }
uint64_t trace_sample_count(void) { return sample_count < sample_room ? sample_count : sample_room; }
const struct call *trace_call(uint64_t at) { return calls + at; }
const struct sample *trace_sample(uint64_t at) { return samples + at; }

/* The file and, if there is one, the exported function of a code address; the file alone is 1. */
int trace_symbol(void *address, const char **file, const char **function) {
    Dl_info found;
    if (!dladdr(address, &found)) return 0;
    *file = found.dli_fname, *function = found.dli_sname;
    return found.dli_sname ? 2 : 1;
}
