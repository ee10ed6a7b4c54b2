/* What is used of CUPTI's callbacks, as cupti_callbacks.h has it, so that compiling needs no CUDA toolkit. */
#pragma once
#include <stdint.h>

#define DRIVER_API 1 /* CUPTI_CB_DOMAIN_DRIVER_API */

/* CUpti_CallbackData */
struct callback_data {
    int site; /* 0: before the call */
    const char *name;
    const void *parameters;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t context_id;
    uint64_t *own; /* the same before and after a call */
    uint32_t correlation;
};
