/* Events: a page of two counters, the records asked for and the latest one reached; shared if interprocess.
 *
 * Waiting on an event means the record that was asked for before the wait, if there was one: a wait that
 * comes too early waits for nothing. A dead process records nothing more; what a wait on its event comes to
 * is a setting.
 */
#define _GNU_SOURCE
#include "double.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "entry_points.h"

#define POLL_US 200

struct event *events;

struct event *find_event(void *handle)
{
    for (struct event *event = events; event; event = event->next)
        if (event == handle && !event->destroyed)
            return event;
    return NULL;
}

/* Takes over both descriptors: the page's, and that of the exporting process (-1: our own event). */
struct event *add_event(struct context *context, unsigned flags, int fd, int exporter_pidfd)
{
    struct event *event = calloc(1, sizeof *event);
    int how = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;

    event->page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, how, fd, 0);
    event->context = context;
    event->flags = flags;
    event->imported = exporter_pidfd >= 0;
    event->exporter_pidfd = exporter_pidfd;
    event->fd = fd;
    if (event->imported || event->page == MAP_FAILED) {
        if (fd >= 0)
            close(fd);
        event->fd = -1;
    }
    if (event->page == MAP_FAILED) {
        if (exporter_pidfd >= 0)
            close(exporter_pidfd);
        free(event);
        return NULL;
    }
    event->next = events;
    events = event;
    return event;
}

void release_event(struct event *event)
{
    if (!event->destroyed || event->queued || event->page == NULL)
        return;
    munmap(event->page, PAGE_BYTES);
    event->page = NULL;
    if (event->fd >= 0)
        close(event->fd);
    if (event->exporter_pidfd >= 0)
        close(event->exporter_pidfd);
}

bool event_reached(struct event *event, unsigned record)
{
    return (int)(event->page->done - record) >= 0;
}

bool orphan_wait_over(struct event *event, struct context *context)
{
    if (settings.orphan_event == ORPHAN_EVENT_HANGS || !process_gone(event->exporter_pidfd))
        return false;
    if (settings.orphan_event == ORPHAN_EVENT_FAILS)
        fail_context(context, LAUNCH_FAILED);
    return true;
}

Result cuEventCreate(void **out, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    int fd = -1;

    if (flags > 7 || ((flags & EVENT_INTERPROCESS) && !(flags & EVENT_DISABLE_TIMING)))
        return INVALID_VALUE;
    if ((flags & EVENT_INTERPROCESS) && !settings.legacy_ipc)
        return NOT_SUPPORTED;
    if (flags & EVENT_INTERPROCESS) {
        fd = new_memory("event", current->device, PAGE_BYTES);
        if (fd < 0)
            return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&state);
    *out = add_event(current, flags, fd, -1);
    pthread_mutex_unlock(&state);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

Result cuEventDestroy(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct event *event = find_event(handle);
    if (event) {
        event->destroyed = true;
        release_event(event);
    }
    pthread_mutex_unlock(&state);
    return event ? SUCCESS : INVALID_HANDLE;
}

Result cuEventRecord(void *handle, void *stream_handle)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct event *event = find_event(handle);
    struct stream *stream = find_stream(stream_handle);
    bool valid = event && stream && event->context == stream->context;
    if (valid) {
        unsigned record = atomic_fetch_add(&event->page->recorded, 1) + 1;
        enqueue(stream, (struct operation){
                            .kind = SIGNAL_EVENT, .event = event, .record = record, .first_of_call = true});
    }
    pthread_mutex_unlock(&state);
    return valid ? SUCCESS : INVALID_HANDLE;
}

Result cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    pthread_mutex_lock(&state);
    struct event *event = find_event(handle);
    struct stream *stream = find_stream(stream_handle);
    if (event && stream)
        enqueue(stream,
                (struct operation){.kind = WAIT_EVENT, .event = event, .record = event->page->recorded});
    pthread_mutex_unlock(&state);
    return event && stream ? SUCCESS : INVALID_HANDLE;
}

/* SUCCESS, NOT_READY, or the error that the context has by now. */
static Result query(void *handle)
{
    Result result = INVALID_HANDLE;

    pthread_mutex_lock(&state);
    struct event *event = find_event(handle);
    if (event && (event_reached(event, event->page->recorded) || orphan_wait_over(event, current)))
        result = current->error;
    else if (event)
        result = current->error ? current->error : NOT_READY;
    pthread_mutex_unlock(&state);
    return result;
}

Result cuEventQuery(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    return query(handle);
}

Result cuEventSynchronize(void *handle)
{
    ENTER(NEEDS_CONTEXT);
    Result result;

    while ((result = query(handle)) == NOT_READY)
        pause_us(POLL_US);
    return result;
}
