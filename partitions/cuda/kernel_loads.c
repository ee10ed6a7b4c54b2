/* Keeps the driver's loads of kernels apart, by CUPTI's callbacks. See kernel_loads.py.
 *
 * Each call that may load kernels waits before it begins until no other one runs and, unless the last one was SHORT, until
 * `rest` times as long has passed since then as that one took, or LONGEST. It holds no lock of the driver while it waits, but may hold some of the library's.
 */
#include "cupti.h"
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#define MOST_FUNCTIONS 4096 /* more than the driver has */
#define SHORT 200000        /* nanoseconds: after a call that took less there is no pause, as hardly a launch is late by it */
#define LONGEST 250000000   /* nanoseconds: of a pause, for what waits for the library and cannot say so */

static const char *const LOADS[] = {
    "cuKernelGetFunction", "cuLibraryLoadData", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", 0,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static uint32_t rest; /* 0: no call waits */
static int running;   /* a call that waited for its turn */
static int64_t next_at;
static uint64_t loads, took_in_all, waited_in_all;

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* `own` becomes when the call began, and in its lowest bit whether it has the turn. */
static void begin(uint64_t *own) {
    pthread_mutex_lock(&lock);
    const int64_t came = now_ns();
    int64_t now = came;
    while (rest && (running || now < next_at)) {
        const struct timespec until = {next_at / 1000000000, next_at % 1000000000};
        if (running)
            pthread_cond_wait(&changed, &lock);
        else
            pthread_cond_timedwait(&changed, &lock, &until);
        now = now_ns();
    }
    waited_in_all += (uint64_t)(now - came);
    running |= rest != 0;
    *own = (uint64_t)now << 1 | (rest != 0);
    pthread_mutex_unlock(&lock);
}

static void end(uint64_t own) {
    pthread_mutex_lock(&lock);
    const int64_t now = now_ns(), took = now - (int64_t)(own >> 1);
    loads++;
    took_in_all += (uint64_t)took;
    if (own & 1) {
        running = 0;
        const int64_t pause = took * rest;
        if (took >= SHORT) next_at = now + (pause < LONGEST ? pause : LONGEST);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

static void called(void *unused, int domain, uint32_t id, const struct callback_data *data) {
    (void)unused, (void)domain, (void)id;
    if (data->site == 0)
        begin(data->own);
    else if (*data->own)
        end(*data->own);
}

/* Once a process; `path` is libcupti's. 0, or CUPTI's error, or less than 0: -1 if there is no such library, -2 if it lacks a
 * function, -3 if it knows none of the driver's. */
int kernel_loads_open(const char *path) {
    void *cupti = dlopen(path, RTLD_NOW);
    if (!cupti) return -1;
    int (*subscribe)(void **, void *, void *) = (int (*)(void **, void *, void *))dlsym(cupti, "cuptiSubscribe");
    int (*enable)(uint32_t, void *, int, uint32_t) = (int (*)(uint32_t, void *, int, uint32_t))dlsym(cupti, "cuptiEnableCallback");
    int (*name_of)(int, uint32_t, const char **) = (int (*)(int, uint32_t, const char **))dlsym(cupti, "cuptiGetCallbackName");
    if (!subscribe || !enable || !name_of) return -2;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &monotonic);
    void *subscriber = 0;
    int failed = subscribe(&subscriber, (void *)called, 0), found = 0;
    for (uint32_t id = 1; !failed && id < MOST_FUNCTIONS; id++) {
        const char *name = 0;
        if (name_of(DRIVER_API, id, &name) || !name) continue;
        for (const char *const *wanted = LOADS; *wanted && !failed; wanted++) {
            if (strcmp(name, *wanted)) continue;
            failed = enable(1, subscriber, DRIVER_API, id);
            found++;
        }
    }
    return failed || found ? failed : -3;
}

/* From now on; with 0 no call waits, and those that do begin. */
void kernel_loads_pace(uint32_t times) {
    pthread_mutex_lock(&lock);
    rest = times;
    if (!times) next_at = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* So far: calls, the nanoseconds that they took, and those that they waited before. */
void kernel_loads_count(uint64_t *into) {
    pthread_mutex_lock(&lock);
    into[0] = loads, into[1] = took_in_all, into[2] = waited_in_all;
    pthread_mutex_unlock(&lock);
}
