/* Memory: the table of what is mapped or pinned, allocations, pinned host memory, questions about pointers.
 *
 * Owns the list of ranges. Every device allocation is a memfd of its own, so it can be shared and outlives
 * its maker.
 */
#define _GNU_SOURCE
#include "double.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "entry_points.h"

#define FREED_FILL 0xdd

pthread_mutex_t state = PTHREAD_MUTEX_INITIALIZER;
struct range *ranges;
size_t used_bytes[MAX_DEVICES];
size_t pinned_used_bytes;
static uint64_t last_id;

struct range *find_range(const char *address)
{
    for (struct range *range = ranges; range; range = range->next)
        if (range->kind != RESERVATION && address >= range->base && address < range->base + range->size)
            return range;
    return NULL;
}

struct range *find_device_range(DevicePointer address)
{
    if (!is_device_address(address))
        return NULL;
    struct range *range = find_range(host_address(address));
    return range && !is_host_range(range) ? range : NULL;
}

struct range *add_range(struct range value)
{
    struct range *range = malloc(sizeof *range);

    *range = value;
    range->id = ++last_id;
    range->next = ranges;
    ranges = range;
    return range;
}

void take_range(struct range *range)
{
    struct range **link = &ranges;

    while (*link != range)
        link = &(*link)->next;
    *link = range->next;
}

/* The name is what /proc shows, and how an import recognises a descriptor as ours. */
int new_memory(const char *kind, int device, size_t bytes)
{
    char name[64];

    snprintf(name, sizeof name, "cuda-double-%s-%d", kind, device);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes)) {
        close(fd);
        return -1;
    }
    return fd;
}

bool process_gone(int pidfd)
{
    struct pollfd question = {.fd = pidfd, .events = POLLIN};

    return pidfd >= 0 && poll(&question, 1, 0) > 0;
}

/* --- device memory ---------------------------------------------------------------------------- */

static Result allocate(DevicePointer *out, size_t bytes) /* state held */
{
    int device = current->device;

    if (used_bytes[device] + whole_pages(bytes) > settings.memory_bytes)
        return OUT_OF_MEMORY;
    int fd = new_memory("memory", device, whole_pages(bytes));
    if (fd < 0)
        return OUT_OF_MEMORY;
    char *base = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        close(fd);
        return OUT_OF_MEMORY;
    }
    used_bytes[device] += whole_pages(bytes);
    add_range(
        (struct range){.kind = DEVICE_ALLOCATION, .base = base, .size = bytes, .device = device, .fd = fd});
    *out = device_address(base);
    return SUCCESS;
}

Result cuMemAlloc(DevicePointer *out, size_t bytes)
{
    ENTER(NEEDS_CONTEXT);
    if (bytes == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    Result result = allocate(out, bytes);
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemFree(DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    if (address == 0)
        return SUCCESS;
    pthread_mutex_lock(&state);
    Result result = INVALID_VALUE;
    struct range *range = find_device_range(address);
    if (range && range->kind == DEVICE_ALLOCATION && device_address(range->base) == address) {
        take_range(range);
        result = retire_memory(range->base, range->size);
        if (range->exported) /* undefined while an importer maps it: it reads this */
            memset(range->base, FREED_FILL, whole_pages(range->size));
        munmap(range->base, whole_pages(range->size));
        close(range->fd);
        used_bytes[range->device] -= whole_pages(range->size);
        free(range);
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemGetAddressRange(DevicePointer *base, size_t *size, DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct range *range = find_device_range(address);
    if (range && base)
        *base = device_address(range->base);
    if (range && size)
        *size = range->size;
    pthread_mutex_unlock(&state);
    return range ? SUCCESS : NOT_FOUND;
}

Result cuMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    *total_bytes = settings.memory_bytes;
    *free_bytes = settings.memory_bytes - used_bytes[current->device];
    pthread_mutex_unlock(&state);
    return SUCCESS;
}

/* --- pointers --------------------------------------------------------------------------------- */

static Result attribute_of(const struct range *range, DevicePointer address, int attribute, void *out)
{
    bool device = !is_host_range(range);
    bool physical = range->kind == VIRTUAL_MAPPING;

    switch (attribute) {
    case 1: /* context: none where memory is mapped by hand */
        *(struct context **)out = physical ? NULL : &primary_contexts[ordinal_of(range->device)];
        return SUCCESS;
    case 2: /* memory type */
        *(unsigned *)out = device ? 2 : 1;
        return SUCCESS;
    case 3: /* device pointer */
        *(DevicePointer *)out = address;
        return SUCCESS;
    case 4: /* host pointer */
        if (device)
            return INVALID_VALUE;
        *(DevicePointer *)out = address;
        return SUCCESS;
    case 7: /* buffer id */
        *(uint64_t *)out = range->id;
        return SUCCESS;
    case 8: /* managed */
        *(unsigned *)out = 0;
        return SUCCESS;
    case 9: /* device ordinal */
        *(int *)out = ordinal_of(range->device);
        return SUCCESS;
    case 10: /* legacy IPC */
        *(unsigned *)out = range->kind == DEVICE_ALLOCATION && settings.legacy_ipc;
        return SUCCESS;
    case 11: /* start */
        *(DevicePointer *)out = device ? device_address(range->base) : (uintptr_t)range->base;
        return SUCCESS;
    case 12: /* size */
        *(size_t *)out = range->size;
        return SUCCESS;
    case 13: /* mapped */
        *(unsigned *)out = 1;
        return SUCCESS;
    case 14: /* handle types that may be exported */
        *(uint64_t *)out = physical ? (uint64_t)range->physical->handle_types : 0;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

static struct range *range_of_pointer(DevicePointer address) /* state held */
{
    if (is_device_address(address))
        return find_device_range(address);
    struct range *range = find_range(host_address(address));
    return range && is_host_range(range) ? range : NULL;
}

Result cuPointerGetAttribute(void *out, int attribute, DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct range *range = range_of_pointer(address);
    Result result = range ? attribute_of(range, address, attribute, out) : INVALID_VALUE;
    pthread_mutex_unlock(&state);
    return result;
}

/* Unlike the call for one attribute, this one leaves untouched what it cannot answer, and succeeds. */
Result cuPointerGetAttributes(unsigned count, int *attributes, void **out, DevicePointer address)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct range *range = range_of_pointer(address);
    for (unsigned i = 0; range && i < count; i++)
        attribute_of(range, address, attributes[i], out[i]);
    pthread_mutex_unlock(&state);
    return SUCCESS;
}

/* --- pinned host memory ----------------------------------------------------------------------- */

/* Whether all of it is mapped, and may be written: read-only pages need a flag to be registered. */
static bool mapped_here(const char *base, size_t bytes, bool *writable)
{
    char line[512];
    uintptr_t next = (uintptr_t)base;
    uintptr_t end = next + bytes;
    FILE *maps = fopen("/proc/self/maps", "re");

    *writable = true;
    while (maps && next < end && fgets(line, sizeof line, maps)) {
        unsigned long from;
        unsigned long to;
        char permissions[8];
        if (sscanf(line, "%lx-%lx %7s", &from, &to, permissions) != 3 || to <= next)
            continue;
        if (from > next)
            break;
        *writable = *writable && permissions[1] == 'w';
        next = to;
    }
    if (maps)
        fclose(maps);
    return next >= end;
}

static bool overlaps_pinned(const char *base, size_t bytes)
{
    for (struct range *range = ranges; range; range = range->next)
        if (is_host_range(range) && base < range->base + range->size && range->base < base + bytes)
            return true;
    return false;
}

static Result pin(char *base, size_t bytes, enum range_kind kind, bool read_only) /* state held */
{
    if (pinned_used_bytes + bytes > settings.pinned_bytes)
        return OUT_OF_MEMORY;
    pinned_used_bytes += bytes;
    add_range((struct range){.kind = kind,
                             .base = base,
                             .size = bytes,
                             .device = current->device,
                             .fd = -1,
                             .read_only = read_only});
    return SUCCESS;
}

Result cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    if (bytes == 0 || flags > 7)
        return INVALID_VALUE;
    char *base = mmap(NULL, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&state);
    Result result = pin(base, whole_pages(bytes), HOST_ALLOCATION, false);
    pthread_mutex_unlock(&state);
    if (result)
        munmap(base, whole_pages(bytes));
    else
        *out = base;
    return result;
}

Result cuMemHostRegister(char *base, size_t bytes, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    bool writable;
    bool read_only = flags & REGISTER_READ_ONLY;

    if (base == NULL || bytes == 0 || flags > 15 || !mapped_here(base, bytes, &writable))
        return INVALID_VALUE;
    if (read_only && !settings.read_only_register)
        return NOT_SUPPORTED;
    if (!writable && !read_only)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    Result result = HOST_MEMORY_ALREADY_REGISTERED;
    if (!overlaps_pinned(base, bytes))
        result = pin(base, bytes, HOST_REGISTRATION, read_only);
    pthread_mutex_unlock(&state);
    return result;
}

static Result unpin(char *base, enum range_kind kind, Result otherwise)
{
    Result result = otherwise;

    pthread_mutex_lock(&state);
    struct range *range = find_range(base);
    if (range && range->kind == kind && range->base == base) {
        take_range(range);
        result = retire_memory(range->base, range->size);
        pinned_used_bytes -= range->size;
        if (kind == HOST_ALLOCATION)
            munmap(range->base, range->size);
        free(range);
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemFreeHost(char *base)
{
    ENTER(NEEDS_CONTEXT);
    return unpin(base, HOST_ALLOCATION, INVALID_VALUE);
}

Result cuMemHostUnregister(char *base)
{
    ENTER(NEEDS_CONTEXT);
    return unpin(base, HOST_REGISTRATION, HOST_MEMORY_NOT_REGISTERED);
}

Result cuMemHostGetDevicePointer(DevicePointer *out, char *base, unsigned flags)
{
    ENTER(NEEDS_CONTEXT);
    pthread_mutex_lock(&state);
    struct range *range = find_range(base);
    bool known = range && is_host_range(range) && flags == 0;
    pthread_mutex_unlock(&state);
    if (known)
        *out = (uintptr_t)base;
    return known ? SUCCESS : INVALID_VALUE;
}
