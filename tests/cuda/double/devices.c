/* Devices and contexts: initialisation, what a device says of itself, primary contexts, the thread's one. */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "entry_points.h"

_Thread_local struct context *current;
struct context primary_contexts[MAX_DEVICES];

#define MAX_PUSHED 16
static _Thread_local struct context *pushed[MAX_PUSHED];
static _Thread_local int pushed_count;

bool valid_ordinal(int ordinal)
{
    return ordinal >= 0 && ordinal < settings.visible_count;
}

int ordinal_of(int physical_device)
{
    for (int i = 0; i < settings.visible_count; i++)
        if (settings.visible[i] == physical_device)
            return i;
    return -1;
}

/* Errors after which a context can only be given up, together with its process. */
bool is_sticky(Result result)
{
    bool fault = result >= 700 && result <= 719;
    bool about_the_call = result == 704 || result == 705 || result == 708 || result == 711 || result == 712 ||
                          result == HOST_MEMORY_NOT_REGISTERED;
    return (fault && !about_the_call) || result == ECC_UNCORRECTABLE || result == UNKNOWN;
}

void fail_context(struct context *context, Result error)
{
    int none = 0;

    atomic_compare_exchange_strong(&context->error, &none, error);
    open_gate();
}

void abandon_context(const struct context *context)
{
    struct range *next;

    pthread_mutex_lock(&state);
    for (struct range *range = ranges; range; range = next) {
        next = range->next;
        if (range->device != context->device)
            continue;
        if (range->kind == IPC_IMPORT) {
            take_range(range);
            munmap(range->base, whole_pages(range->size));
            close(range->exporter_pidfd);
            free(range);
        } else if (range->kind == HOST_REGISTRATION) {
            take_range(range);
            pinned_used_bytes -= range->size;
            free(range);
        }
    }
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context && !stream->is_default) {
            stream->destroyed = true;
            pthread_cond_signal(&stream->wake);
        }
    for (struct event *event = events, *after; event; event = after) {
        after = event->next;
        if (event->context == context && !event->destroyed) {
            event->destroyed = true;
            release_event(event);
        }
    }
    pthread_mutex_unlock(&state);
}

Result cuInit(unsigned flags)
{
    if (forked())
        return NOT_INITIALIZED;
    load_settings();
    int injected = count_call(__func__);
    if (injected)
        return injected;
    if (settings.mistake || flags)
        return INVALID_VALUE;
    if (settings.visible_count == 0)
        return NO_DEVICE;
    for (int i = 0; i < settings.visible_count; i++) {
        primary_contexts[i].ordinal = i;
        primary_contexts[i].device = settings.visible[i];
    }
    set_initialised();
    return SUCCESS;
}

Result cuDriverGetVersion(int *version)
{
    load_settings();
    int injected = count_call(__func__);
    *version = settings.driver_version;
    return injected;
}

Result cuDeviceGetCount(int *count)
{
    ENTER(NEEDS_INIT);
    *count = settings.visible_count;
    return SUCCESS;
}

Result cuDeviceGet(int *device, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

Result cuDeviceGetUuid(unsigned char *uuid, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    uuid_of(settings.visible[ordinal], uuid);
    return SUCCESS;
}

Result cuDeviceGetName(char *name, int bytes, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal) || bytes < 1)
        return INVALID_DEVICE;
    snprintf(name, (size_t)bytes, "Test double of GPU %d", settings.visible[ordinal]);
    return SUCCESS;
}

Result cuDeviceTotalMem(size_t *bytes, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    *bytes = settings.memory_bytes;
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    static const struct {
        int attribute;
        int value;
    } table[] = {
        {16, 4},  /* multiprocessors */
        {31, 1},  /* concurrent kernels */
        {40, 2},  /* copy engines */
        {41, 1},  /* unified addressing */
        {75, 9},  /* compute capability, major */
        {91, 1},  /* a host pointer serves for registered memory */
        {99, 1},  /* host registration */
        {102, 1}, /* virtual memory management */
        {115, 1}, /* memory pools */
        {122, 1}, /* 64-bit values in streams */
        {123, 1}, /* waiting with NOR */
    };

    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    *value = 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].attribute == attribute)
            *value = table[i].value;
    if (attribute == 33) /* PCI bus */
        *value = settings.visible[ordinal] + 1;
    if (attribute == 103)
        *value = settings.vmm_descriptors;
    if (attribute == 113)
        *value = settings.read_only_register;
    if (attribute == 125)
        *value = settings.legacy_ipc;
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(struct context **context, int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    primary_contexts[ordinal].retained++;
    *context = &primary_contexts[ordinal];
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease(int ordinal)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    unsigned retained = primary_contexts[ordinal].retained;
    do {
        if (retained == 0)
            return INVALID_CONTEXT;
    } while (!atomic_compare_exchange_weak(&primary_contexts[ordinal].retained, &retained, retained - 1));
    if (retained == 1 && primary_contexts[ordinal].error)
        abandon_context(&primary_contexts[ordinal]);
    return SUCCESS;
}

Result cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active)
{
    ENTER(NEEDS_INIT);
    if (!valid_ordinal(ordinal))
        return INVALID_DEVICE;
    *flags = 0;
    *active = primary_contexts[ordinal].retained > 0;
    return SUCCESS;
}

static bool valid_context(const struct context *context)
{
    for (int i = 0; i < settings.visible_count; i++)
        if (context == &primary_contexts[i] && context->retained)
            return true;
    return false;
}

Result cuCtxSetCurrent(struct context *context)
{
    ENTER(NEEDS_INIT);
    if (context && !valid_context(context))
        return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}

Result cuCtxGetCurrent(struct context **context)
{
    ENTER(NEEDS_INIT);
    *context = current;
    return SUCCESS;
}

Result cuCtxPushCurrent(struct context *context)
{
    ENTER(NEEDS_INIT);
    if (!valid_context(context))
        return INVALID_CONTEXT;
    if (pushed_count == MAX_PUSHED)
        return OUT_OF_MEMORY;
    pushed[pushed_count++] = current;
    current = context;
    return SUCCESS;
}

Result cuCtxPopCurrent(struct context **context)
{
    ENTER(NEEDS_INIT);
    if (current == NULL)
        return INVALID_CONTEXT;
    if (context)
        *context = current;
    current = pushed_count ? pushed[--pushed_count] : NULL;
    return SUCCESS;
}

Result cuCtxGetDevice(int *ordinal)
{
    ENTER(NEEDS_CONTEXT);
    *ordinal = current->ordinal;
    return SUCCESS;
}

/* Since 13.0 the call may name a context. */
Result cuCtxGetDevice_v2(int *ordinal, struct context *context)
{
    ENTER(context ? NEEDS_INIT : NEEDS_CONTEXT);
    if (context && !valid_context(context))
        return INVALID_CONTEXT;
    *ordinal = context ? context->ordinal : current->ordinal;
    return SUCCESS;
}
