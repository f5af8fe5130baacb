/* Legacy interprocess handles: 64 bytes that name a memory or an event of a living process.
 *
 * A handle says the exporter's process and descriptor; opening goes through /proc, so that it fails once the
 * exporter is dead or freed the memory, and where process ids mean something else. What was opened stays.
 */
#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "entry_points.h"

#define MEMORY_MAGIC 0x5e90e001u
#define EVENT_MAGIC 0x5e90e002u
#define LAZY_PEER_ACCESS 1

long double_opens;

static Result describe(struct ipc_handle *out, uint32_t magic, int fd, int device, size_t size)
{
    struct stat status;

    if (fstat(fd, &status))
        return INVALID_HANDLE;
    *out = (struct ipc_handle){
        .magic = magic, .pid = getpid(), .fd = fd, .device = device, .size = size, .inode = status.st_ino};
    return SUCCESS;
}

/* The exporter's descriptor, ours now, and one by which we see it die; -1 where it cannot be had any more. */
static int open_exported(const struct ipc_handle *handle, int *pidfd)
{
    char path[64];
    struct stat status;
    int fd = -1;

    *pidfd = (int)syscall(SYS_pidfd_open, handle->pid, 0);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    if (*pidfd >= 0)
        fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_ino == handle->inode)
        return fd;
    if (fd >= 0)
        close(fd);
    if (*pidfd >= 0)
        close(*pidfd);
    return -1;
}

Result cuIpcGetMemHandle(struct ipc_handle *out, DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    if (!settings.legacy_ipc)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&state);
    Result result = INVALID_VALUE;
    struct range *range = find_device_range(address);
    bool base = range && device_address(range->base) == address;
    /* Memory that was made by cuMemCreate has no legacy handle. The documentation asks for the base. */
    if (range && range->kind == DEVICE_ALLOCATION && (base || !settings.strict)) {
        range->exported = true;
        result = describe(out, MEMORY_MAGIC, range->fd, range->device, range->size);
    }
    pthread_mutex_unlock(&state);
    return result;
}

static Result import_memory(DevicePointer *out, const struct ipc_handle *handle) /* state held */
{
    int pidfd;

    for (struct range *range = ranges; range; range = range->next) {
        if (range->kind == IPC_IMPORT && range->exporter_pid == handle->pid &&
            range->inode == handle->inode) {
            range->opens++;
            double_opens++;
            *out = device_address(range->base);
            return SUCCESS;
        }
    }
    int fd = open_exported(handle, &pidfd);
    if (fd < 0)
        return INVALID_VALUE;
    char *base = mmap(NULL, whole_pages(handle->size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) {
        close(pidfd);
        return OUT_OF_MEMORY;
    }
    add_range((struct range){.kind = IPC_IMPORT,
                             .base = base,
                             .size = handle->size,
                             .device = handle->device,
                             .fd = -1,
                             .opens = 1,
                             .exporter_pid = handle->pid,
                             .exporter_pidfd = pidfd,
                             .inode = handle->inode});
    *out = device_address(base);
    return SUCCESS;
}

Result cuIpcOpenMemHandle(DevicePointer *out, struct ipc_handle handle, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (!settings.legacy_ipc)
        return NOT_SUPPORTED;
    if (flags != LAZY_PEER_ACCESS || handle.magic != MEMORY_MAGIC)
        return INVALID_VALUE;
    if (handle.pid == getpid())
        return INVALID_CONTEXT;
    if (ordinal_of(handle.device) < 0)
        return INVALID_DEVICE;
    if (settings.strict && current->device != handle.device)
        return INVALID_CONTEXT; /* the context of another GPU: there are no peers */
    pthread_mutex_lock(&state);
    Result result = import_memory(out, &handle);
    pthread_mutex_unlock(&state);
    return result;
}

Result cuIpcCloseMemHandle(DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    Result result = INVALID_VALUE;
    struct range *range = find_device_range(address);
    if (range && range->kind == IPC_IMPORT && device_address(range->base) == address) {
        result = SUCCESS;
        if (--range->opens == 0) {
            take_range(range);
            result = retire_memory(range->base, range->size);
            munmap(range->base, whole_pages(range->size));
            close(range->exporter_pidfd);
            free(range);
        }
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuIpcGetEventHandle(struct ipc_handle *out, void *handle)
{
    ENTER(NEEDS_CONTEXT);
    if (!settings.legacy_ipc)
        return NOT_SUPPORTED;
    pthread_mutex_lock(&state);
    struct event *event = find_event(handle);
    Result result = INVALID_HANDLE;
    if (event && event->fd >= 0)
        result = describe(out, EVENT_MAGIC, event->fd, event->context->device, PAGE_BYTES);
    pthread_mutex_unlock(&state);
    return result;
}

Result cuIpcOpenEventHandle(void **out, struct ipc_handle handle)
{
    ENTER(NEEDS_CONTEXT);
    int pidfd;

    if (!settings.legacy_ipc)
        return NOT_SUPPORTED;
    if (handle.magic != EVENT_MAGIC)
        return INVALID_HANDLE;
    if (handle.pid == getpid())
        return INVALID_CONTEXT;
    if (settings.strict && current->device != handle.device)
        return INVALID_CONTEXT;
    int fd = open_exported(&handle, &pidfd);
    if (fd < 0)
        return INVALID_HANDLE;
    pthread_mutex_lock(&state);
    struct event *event = add_event(current, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING, fd, pidfd);
    pthread_mutex_unlock(&state);
    *out = event;
    return event ? SUCCESS : OUT_OF_MEMORY;
}
