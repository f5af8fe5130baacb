/* Copies, fills and values in streams: the addresses are checked when the call is made, the bytes move later.
 *
 * An address that is mapped but may not be used in that way is a fault: it shows when the stream gets there.
 */
#define _GNU_SOURCE
#include "double.h"

#include <stdlib.h>
#include <string.h>

#include "entry_points.h"

enum side { ON_HOST, ON_DEVICE, ANYWHERE };
enum direction { READING, WRITING };

struct span {
    char *host;
    bool pageable; /* host memory that is not pinned */
    bool faults;
};

/* What one range says about being used; faults are noted in `span`. */
static Result check_range(const struct range *range, enum direction direction, struct context *context,
                          struct span *span)
{
    bool writing = direction == WRITING;

    if (is_host_range(range))
        return writing && range->read_only ? INVALID_VALUE : SUCCESS;
    if (settings.strict && range->device != context->device)
        return INVALID_CONTEXT; /* the stream of another GPU: there are no peers */
    if (range->kind == VIRTUAL_MAPPING && !(range->access & (writing ? 2 : 1)))
        span->faults = true;
    if (range->kind == IPC_IMPORT && settings.orphan_memory_faults && process_gone(range->exporter_pidfd))
        span->faults = true;
    return SUCCESS;
}

/* One side of a copy. It ends within one range; only virtual mappings side by side count as one. */
static Result resolve(DevicePointer address, size_t bytes, enum side side, enum direction direction,
                      struct context *context, struct span *span) /* state held */
{
    bool device = is_device_address(address);
    char *next = host_address(address);
    char *end = next + bytes;

    *span = (struct span){.host = next};
    if (end < next || (side == ON_HOST && device))
        return INVALID_VALUE;
    for (struct range *range, *before = NULL; next < end; before = range) {
        range = find_range(next);
        bool apart = before && range && (before->kind != VIRTUAL_MAPPING || range->kind != VIRTUAL_MAPPING);
        if (range == NULL || apart || is_host_range(range) == device) {
            if (device || side == ON_DEVICE)
                return INVALID_VALUE;
            span->pageable = true;
            return SUCCESS;
        }
        Result result = check_range(range, direction, context, span);
        if (result)
            return result;
        next = range->base + range->size;
    }
    return SUCCESS;
}

struct copy {
    DevicePointer destination;
    DevicePointer source;
    size_t bytes;
    enum side destination_side;
    enum side source_side;
    bool asynchronous;
    bool source_read_now; /* the order asked for allows the source to be read before earlier work is done */
};

/* The operation for a copy, not queued yet; `wait`: the call has to wait for it. */
static Result prepare(struct stream *stream, const struct copy *copy, struct operation *operation, bool *wait)
{
    struct context *context = stream->context;
    struct span to;
    struct span from;

    Result result = resolve(copy->destination, copy->bytes, copy->destination_side, WRITING, context, &to);
    if (result == SUCCESS)
        result = resolve(copy->source, copy->bytes, copy->source_side, READING, context, &from);
    if (result)
        return result;
    bool pageable = to.pageable || from.pageable;
    if (copy->asynchronous && pageable && settings.strict)
        return INVALID_VALUE; /* CUDA would copy it, but not asynchronously: never what we mean */
    *wait = !copy->asynchronous || pageable;
    *operation =
        (struct operation){.kind = COPY, .destination = to.host, .source = from.host, .bytes = copy->bytes};
    if (to.faults || from.faults)
        operation->error = ILLEGAL_ADDRESS;
    else if (copy->source_read_now) {
        operation->snapshot = malloc(copy->bytes);
        memcpy(operation->snapshot, from.host, copy->bytes);
        operation->source = operation->snapshot;
    }
    return SUCCESS;
}

static Result copy_one(void *stream_handle, struct copy copy)
{
    struct operation operation;
    bool wait = false;

    if (copy.bytes == 0)
        return SUCCESS;
    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(stream_handle);
    Result result = stream ? prepare(stream, &copy, &operation, &wait) : INVALID_HANDLE;
    if (result == SUCCESS) {
        operation.first_of_call = true;
        enqueue(stream, operation);
        if (wait) {
            drain_stream(stream);
            result = stream->context->error;
        }
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemcpyHtoD(DevicePointer destination, const void *source, size_t bytes)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(NULL,
                    (struct copy){destination, (uintptr_t)source, bytes, ON_DEVICE, ON_HOST, false, false});
}

Result cuMemcpyDtoH(void *destination, DevicePointer source, size_t bytes)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(NULL,
                    (struct copy){(uintptr_t)destination, source, bytes, ON_HOST, ON_DEVICE, false, false});
}

Result cuMemcpyDtoD(DevicePointer destination, DevicePointer source, size_t bytes)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(NULL, (struct copy){destination, source, bytes, ON_DEVICE, ON_DEVICE, false, false});
}

Result cuMemcpyHtoDAsync(DevicePointer destination, const void *source, size_t bytes, void *stream)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(stream,
                    (struct copy){destination, (uintptr_t)source, bytes, ON_DEVICE, ON_HOST, true, false});
}

Result cuMemcpyDtoHAsync(void *destination, DevicePointer source, size_t bytes, void *stream)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(stream,
                    (struct copy){(uintptr_t)destination, source, bytes, ON_HOST, ON_DEVICE, true, false});
}

Result cuMemcpyDtoDAsync(DevicePointer destination, DevicePointer source, size_t bytes, void *stream)
{
    ENTER(NEEDS_CONTEXT);
    return copy_one(stream, (struct copy){destination, source, bytes, ON_DEVICE, ON_DEVICE, true, false});
}

/* --- batches ---------------------------------------------------------------------------------- */

/* Entry k of the attributes is for the copies from first[k] up to first[k + 1]; every copy needs one. */
static bool valid_attributes(const struct copy_attributes *attributes, const size_t *first, size_t entries,
                             size_t count)
{
    if (entries == 0 || entries > count || first[0] != 0)
        return false;
    for (size_t k = 0; k < entries; k++) {
        if (attributes[k].source_order < SOURCE_ORDER_STREAM || attributes[k].source_order > SOURCE_ORDER_ANY)
            return false;
        if (k > 0 && (first[k] <= first[k - 1] || first[k] >= count))
            return false;
    }
    return true;
}

/* All or nothing: what cannot be done is found before anything is queued. */
Result cuMemcpyBatchAsync(DevicePointer *destinations, DevicePointer *sources, size_t *sizes, size_t count,
                          struct copy_attributes *attributes, size_t *first, size_t entries,
                          void *stream_handle)
{
    ENTER(NEEDS_CONTEXT);
    bool wait = false;

    if ((uintptr_t)stream_handle <= 1 || count == 0 || !valid_attributes(attributes, first, entries, count))
        return INVALID_VALUE;
    struct operation *prepared = calloc(count, sizeof *prepared);
    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(stream_handle);
    Result result = stream ? SUCCESS : INVALID_HANDLE;
    size_t entry = 0;
    for (size_t i = 0; i < count && result == SUCCESS; i++) {
        if (entry + 1 < entries && first[entry + 1] == i)
            entry++;
        bool now = attributes[entry].source_order != SOURCE_ORDER_STREAM;
        struct copy copy = {destinations[i], sources[i], sizes[i], ANYWHERE, ANYWHERE, true, now};
        bool wait_for_it = false;
        result = sizes[i] ? prepare(stream, &copy, &prepared[i], &wait_for_it) : INVALID_VALUE;
        wait = wait || wait_for_it;
    }
    for (size_t i = count; i-- > 0;) { /* in any order, says CUDA: in the one that nobody means */
        prepared[i].first_of_call = i == count - 1;
        if (result == SUCCESS)
            enqueue(stream, prepared[i]);
        else
            free(prepared[i].snapshot);
    }
    if (result == SUCCESS && wait)
        drain_stream(stream);
    pthread_mutex_unlock(&state);
    free(prepared);
    return result;
}

/* --- fills and values ------------------------------------------------------------------------- */

Result cuMemsetD8Async(DevicePointer destination, unsigned char fill, size_t bytes, void *stream_handle)
{
    ENTER(NEEDS_CONTEXT);
    struct span to;

    if (bytes == 0)
        return SUCCESS;
    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(stream_handle);
    Result result =
        stream ? resolve(destination, bytes, ON_DEVICE, WRITING, stream->context, &to) : INVALID_HANDLE;
    if (result == SUCCESS)
        enqueue(stream, (struct operation){.kind = FILL,
                                           .destination = to.host,
                                           .bytes = bytes,
                                           .fill = fill,
                                           .first_of_call = true,
                                           .error = to.faults ? ILLEGAL_ADDRESS : 0});
    pthread_mutex_unlock(&state);
    return result;
}

static Result value_operation(void *stream_handle, DevicePointer address, struct operation operation)
{
    struct span at;
    bool writing = operation.kind == WRITE_VALUE;

    if (address % operation.bytes)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(stream_handle);
    Result result = INVALID_HANDLE;
    if (stream)
        result =
            resolve(address, operation.bytes, ON_DEVICE, writing ? WRITING : READING, stream->context, &at);
    if (result == SUCCESS) {
        if (writing)
            operation.destination = at.host;
        else
            operation.source = at.host;
        operation.error = at.faults ? ILLEGAL_ADDRESS : 0;
        operation.first_of_call = true;
        enqueue(stream, operation);
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuStreamWriteValue32(void *stream, DevicePointer address, uint32_t value, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    return value_operation(stream, address,
                           (struct operation){.kind = WRITE_VALUE, .bytes = 4, .value = value});
}

Result cuStreamWriteValue64(void *stream, DevicePointer address, uint64_t value, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    return value_operation(stream, address,
                           (struct operation){.kind = WRITE_VALUE, .bytes = 8, .value = value});
}

Result cuStreamWaitValue32(void *stream, DevicePointer address, uint32_t value, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    return value_operation(
        stream, address,
        (struct operation){.kind = WAIT_VALUE, .bytes = 4, .value = value, .comparison = flags & 3});
}

Result cuStreamWaitValue64(void *stream, DevicePointer address, uint64_t value, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    return value_operation(
        stream, address,
        (struct operation){.kind = WAIT_VALUE, .bytes = 8, .value = value, .comparison = flags & 3});
}
