/* A libcupti for tests: `stub_call` is a call of the driver that takes so many nanoseconds. Only functions that were enabled
 * are noticed; their ids are their places in NAMES. */
#include "../partitions/cuda/cupti.h"
#include <string.h>
#include <time.h>

static const char *const NAMES[] = {"cuInit", "cuGraphLaunch", "cuKernelGetFunction", "cuLibraryLoadData"};
#define COUNT (sizeof NAMES / sizeof *NAMES)
static int enabled[COUNT];
static void (*callback)(void *, int, uint32_t, const struct callback_data *);

int cuptiSubscribe(void **subscriber, void *function, void *data) {
    (void)subscriber, (void)data;
    callback = (void (*)(void *, int, uint32_t, const struct callback_data *))function;
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
    if (domain != DRIVER_API || id >= COUNT) return 1;
    *name = NAMES[id];
    return 0;
}

int cuptiEnableCallback(uint32_t enable, void *subscriber, int domain, uint32_t id) {
    (void)subscriber;
    if (domain != DRIVER_API || id >= COUNT) return 7;
    enabled[id] = enable != 0;
    return 0;
}

int cuptiEnableDomain(uint32_t enable, void *subscriber, int domain) {
    (void)subscriber;
    for (uint32_t id = 0; id < COUNT; id++) enabled[id] = enable != 0;
    return enable == 1 && domain == DRIVER_API ? 0 : 7;
}

void stub_call(const char *name, long nanoseconds) {
    uint64_t own = 0;
    uint32_t id = 0;
    while (id < COUNT && strcmp(NAMES[id], name)) id++;
    const int noticed = id < COUNT && enabled[id];
    struct callback_data data = {.name = name, .own = &own};
    const struct timespec time = {0, nanoseconds};
    if (noticed) callback(0, DRIVER_API, id, &data);
    if (nanoseconds) nanosleep(&time, 0);
    data.site = 1;
    if (noticed) callback(0, DRIVER_API, id, &data);
}
