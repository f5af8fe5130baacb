/* Streams: one thread each, that does what was queued in order, as slowly as the settings or a test ask.
 *
 * Slow copies go back to front in chunks, so that data taken too early is visibly torn and the arrival of the
 * last byte says nothing about the first. Once a context has failed, its queued work is dropped, never done.
 * Default streams do not wait for others, as CUDA's legacy stream would: less order finds more mistakes.
 */
#define _GNU_SOURCE
#include "double.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "entry_points.h"

#define CHUNK_BYTES (64ul << 10)
#define POLL_US 200
#define PRIORITY_MOST (-5)

struct stream *streams;
static struct stream *default_streams[MAX_DEVICES];
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; /* with `state`: an operation was completed */

/* --- the gate: lets a test stop every stream of this process, after so many bytes ------------- */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_opened = PTHREAD_COND_INITIALIZER;
static long gate_bytes = -1; /* that may still pass; -1: all */

void hold_streams(long bytes)
{
    pthread_mutex_lock(&gate);
    gate_bytes = bytes;
    pthread_cond_broadcast(&gate_opened);
    pthread_mutex_unlock(&gate);
}

void open_gate(void)
{
    pthread_mutex_lock(&gate);
    pthread_cond_broadcast(&gate_opened);
    pthread_mutex_unlock(&gate);
}

/* Waits until something may pass or the context has failed. What moves no bytes asks for 0. */
void pass_gate(struct context *context, size_t wanted, size_t *granted)
{
    pthread_mutex_lock(&gate);
    while (gate_bytes == 0 && !context->error)
        pthread_cond_wait(&gate_opened, &gate);
    *granted = wanted;
    if (gate_bytes > 0) {
        if (wanted > (size_t)gate_bytes)
            *granted = (size_t)gate_bytes;
        gate_bytes -= (long)*granted;
    }
    pthread_mutex_unlock(&gate);
}

void pause_us(long us)
{
    struct timespec pause = {us / 1000000, us % 1000000 * 1000};

    if (us > 0)
        nanosleep(&pause, NULL);
}

/* --- doing the work --------------------------------------------------------------------------- */

static void move(const struct operation *operation, struct context *context)
{
    size_t left = operation->bytes;

    while (left && !context->error) {
        bool slow = settings.megabytes_per_s > 0;
        size_t chunk = slow && left > CHUNK_BYTES ? CHUNK_BYTES : left;
        pass_gate(context, chunk, &chunk);
        if (context->error)
            return;
        left -= chunk;
        if (operation->kind == FILL)
            memset(operation->destination + left, operation->fill, chunk);
        else
            memmove(operation->destination + left, operation->source + left, chunk);
        if (slow)
            pause_us((long)chunk / settings.megabytes_per_s);
    }
}

static void write_value(const struct operation *operation)
{
    if (operation->bytes == 8)
        atomic_store((_Atomic uint64_t *)(void *)operation->destination, operation->value);
    else
        atomic_store((_Atomic uint32_t *)(void *)operation->destination, (uint32_t)operation->value);
}

static bool value_reached(const struct operation *operation)
{
    bool wide = operation->bytes == 8;
    uint64_t wanted = operation->value;
    uint64_t found = wide ? atomic_load((const _Atomic uint64_t *)(const void *)operation->source)
                          : atomic_load((const _Atomic uint32_t *)(const void *)operation->source);

    switch (operation->comparison) {
    case 0: /* at least, in modular arithmetic */
        return wide ? (int64_t)(found - wanted) >= 0 : (int32_t)(uint32_t)(found - wanted) >= 0;
    case 1:
        return found == wanted;
    case 2:
        return (found & wanted) != 0;
    default:
        return (wide ? ~(found | wanted) : (uint32_t)~(found | wanted)) != 0;
    }
}

static void signal_event(const struct operation *operation)
{
    atomic_uint *done = &operation->event->page->done;
    unsigned before = *done;

    while ((int)(operation->record - before) > 0 &&
           !atomic_compare_exchange_weak(done, &before, operation->record))
        continue;
}

static void run(const struct operation *operation, struct context *context)
{
    size_t nothing;

    if (operation->first_of_call && !context->error)
        pause_us(settings.op_us);
    pass_gate(context, 0, &nothing);
    if (operation->error && !context->error)
        fail_context(context, operation->error);
    if (context->error)
        return;
    switch (operation->kind) {
    case COPY:
    case FILL:
        move(operation, context);
        break;
    case SIGNAL_EVENT:
        signal_event(operation);
        break;
    case WAIT_EVENT:
        while (!context->error && !event_reached(operation->event, operation->record) &&
               !orphan_wait_over(operation->event, context))
            pause_us(POLL_US);
        break;
    case WRITE_VALUE:
        write_value(operation);
        break;
    case WAIT_VALUE: /* the memory may be another process's, and anyone may write it */
        while (!context->error && !value_reached(operation))
            pause_us(POLL_US);
        break;
    }
}

static void complete(struct stream *stream, struct operation *operation) /* state held */
{
    stream->head = operation->next;
    if (stream->head == NULL)
        stream->tail = NULL;
    stream->completed++;
    if (operation->event) {
        operation->event->queued--;
        release_event(operation->event);
    }
    free(operation->snapshot);
    free(operation);
    pthread_cond_broadcast(&progress);
}

static void *work(void *argument)
{
    struct stream *stream = argument;

    pthread_mutex_lock(&state);
    for (;;) {
        struct operation *operation = stream->head;
        if (operation) {
            pthread_mutex_unlock(&state);
            run(operation, stream->context);
            pthread_mutex_lock(&state);
            complete(stream, operation);
        } else if (stream->destroyed) {
            break;
        } else {
            pthread_cond_wait(&stream->wake, &state);
        }
    }
    pthread_mutex_unlock(&state);
    return NULL;
}

/* --- the queue -------------------------------------------------------------------------------- */

static struct stream *add_stream(struct context *context, unsigned flags, int priority) /* state held */
{
    struct stream *stream = calloc(1, sizeof *stream);
    sigset_t all;
    sigset_t before;
    pthread_t thread;

    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    pthread_cond_init(&stream->wake, NULL);
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    int failed = pthread_create(&thread, NULL, work, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    stream->next = streams;
    streams = stream;
    return stream;
}

bool is_default_stream(void *handle)
{
    return (uintptr_t)handle <= 2;
}

struct stream *find_stream(void *handle)
{
    if (is_default_stream(handle)) {
        struct stream **stream = &default_streams[current->ordinal];
        if (*stream == NULL)
            *stream = add_stream(current, 0, 0);
        if (*stream)
            (*stream)->is_default = true;
        return *stream;
    }
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream == handle && !stream->destroyed)
            return stream;
    return NULL;
}

void enqueue(struct stream *stream, struct operation value)
{
    struct operation *operation = malloc(sizeof *operation);

    *operation = value;
    operation->next = NULL;
    int late = take_late_error();
    if (late)
        operation->error = late;
    if (operation->event)
        operation->event->queued++;
    if (stream->tail)
        stream->tail->next = operation;
    else
        stream->head = operation;
    stream->tail = operation;
    stream->submitted++;
    pthread_cond_signal(&stream->wake);
}

void drain_stream(struct stream *stream)
{
    uint64_t target = stream->submitted;

    while (stream->completed < target)
        pthread_cond_wait(&progress, &state);
}

static bool touches(const char *start, size_t bytes, const char *base, size_t size)
{
    return start && start < base + size && base < start + bytes;
}

Result retire_memory(const char *base, size_t bytes)
{
    Result result = SUCCESS;

    for (struct stream *stream = streams; stream && settings.strict; stream = stream->next) {
        for (struct operation *operation = stream->head; operation; operation = operation->next) {
            if (touches(operation->destination, operation->bytes, base, bytes) ||
                touches(operation->source, operation->bytes, base, bytes)) {
                fail_context(stream->context, ILLEGAL_ADDRESS);
                result = ILLEGAL_ADDRESS;
            }
        }
    }
    for (struct stream *stream = streams; stream; stream = stream->next)
        drain_stream(stream);
    return result;
}

/* --- entry points ----------------------------------------------------------------------------- */

Result cuStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    ENTER(NEEDS_CONTEXT);
    if (flags > 1)
        return INVALID_VALUE;
    if (priority < PRIORITY_MOST)
        priority = PRIORITY_MOST;
    pthread_mutex_lock(&state);
    *out = add_stream(current, flags, priority > 0 ? 0 : priority);
    pthread_mutex_unlock(&state);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

Result cuStreamCreate(void **out, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (flags > 1)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    *out = add_stream(current, flags, 0);
    pthread_mutex_unlock(&state);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

/* Returns at once; what is queued is still done. */
Result cuStreamDestroy(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct stream *stream = is_default_stream(handle) ? NULL : find_stream(handle);
    if (stream) {
        stream->destroyed = true;
        pthread_cond_signal(&stream->wake);
    }
    pthread_mutex_unlock(&state);
    return stream ? SUCCESS : INVALID_HANDLE;
}

Result cuStreamQuery(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    Result result = INVALID_HANDLE;

    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(handle);
    if (stream)
        result = stream->completed < stream->submitted ? NOT_READY : stream->context->error;
    pthread_mutex_unlock(&state);
    return result;
}

Result cuStreamSynchronize(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct stream *stream = find_stream(handle);
    if (stream)
        drain_stream(stream);
    pthread_mutex_unlock(&state);
    return stream ? stream->context->error : INVALID_HANDLE;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(NEEDS_CONTEXT);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = PRIORITY_MOST;
    return SUCCESS;
}

static Result synchronize_context(struct context *context)
{
    pthread_mutex_lock(&state);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->context == context)
            drain_stream(stream);
    pthread_mutex_unlock(&state);
    return context->error;
}

Result cuCtxSynchronize(void)
{
    ENTER(NEEDS_CONTEXT);
    return synchronize_context(current);
}

/* Since 13.0 the call may name a context. */
Result cuCtxSynchronize_v2(struct context *context)
{
    ENTER(NEEDS_CONTEXT);
    return synchronize_context(context ? context : current);
}
