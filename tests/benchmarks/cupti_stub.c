/* A libcupti for tests: `stub_call` is a call of the driver that takes so many nanoseconds. */
#include <stdint.h>
#include <time.h>

struct callback_data {
    int site;
    const char *name;
    const void *parameters;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t context_id;
    uint64_t *own;
    uint32_t correlation;
};

static void (*callback)(void *, int, uint32_t, const struct callback_data *);

int cuptiSubscribe(void **subscriber, void *function, void *data) {
    (void)subscriber, (void)data;
    callback = (void (*)(void *, int, uint32_t, const struct callback_data *))function;
    return 0;
}

int cuptiEnableDomain(uint32_t enable, void *subscriber, int domain) {
    (void)subscriber;
    return enable == 1 && domain == 1 ? 0 : 7;
}

void stub_call(const char *name, long nanoseconds) {
    uint64_t own = 0;
    struct callback_data data = {.name = name, .own = &own};
    const struct timespec time = {0, nanoseconds};
    callback(0, 1, 5, &data);
    if (nanoseconds) nanosleep(&time, 0);
    data.site = 1;
    callback(0, 1, 5, &data);
}
