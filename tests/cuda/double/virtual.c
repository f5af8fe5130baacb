/* Virtual memory management: physical memory made, exported by descriptor, imported, mapped at addresses.
 *
 * The descriptor that is exported is the memory itself, so it lives as long as any descriptor or mapping
 * does, whichever process has it. These calls need no current context, as documented.
 */
#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "entry_points.h"

#define POSIX_DESCRIPTOR 1
#define LOCATION_DEVICE 1
#define PINNED 1

struct physical *physicals;

static struct physical *add_physical(struct physical value) /* state held */
{
    struct physical *physical = malloc(sizeof *physical);

    *physical = value;
    physical->next = physicals;
    physicals = physical;
    return physical;
}

static struct physical *find_physical(void *handle) /* state held; NULL: released, or never was one */
{
    for (struct physical *physical = physicals; physical; physical = physical->next)
        if (physical == handle && physical->handles)
            return physical;
    return NULL;
}

static void free_if_unused(struct physical *physical) /* state held */
{
    if (physical->handles || physical->mappings)
        return;
    if (!physical->imported)
        used_bytes[physical->device] -= physical->size;
    close(physical->fd);
    physical->fd = -1;
}

Result cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_properties *properties,
                                     int option)
{
    ENTER(NEEDS_INIT);
    if (properties->location.type != LOCATION_DEVICE || !valid_ordinal(properties->location.id) || option > 1)
        return INVALID_VALUE;
    *bytes = GRANULARITY_BYTES;
    return SUCCESS;
}

Result cuMemCreate(void **out, size_t bytes, const struct allocation_properties *properties,
                   unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    if (flags || bytes == 0 || bytes % GRANULARITY_BYTES || properties->type != PINNED)
        return INVALID_VALUE;
    if (properties->location.type != LOCATION_DEVICE || !valid_ordinal(properties->location.id))
        return INVALID_DEVICE;
    if (properties->handle_types & ~POSIX_DESCRIPTOR ||
        (properties->handle_types && !settings.vmm_descriptors))
        return NOT_SUPPORTED;
    int device = settings.visible[properties->location.id];
    Result result = OUT_OF_MEMORY;
    pthread_mutex_lock(&state);
    int fd = used_bytes[device] + bytes > settings.memory_bytes ? -1 : new_memory("vmm", device, bytes);
    if (fd >= 0) {
        used_bytes[device] += bytes;
        *out = add_physical((struct physical){.fd = fd,
                                              .device = device,
                                              .handle_types = properties->handle_types,
                                              .size = bytes,
                                              .handles = 1});
        result = SUCCESS;
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemRelease(void *handle)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&state);
    struct physical *physical = find_physical(handle);
    if (physical) {
        physical->handles--;
        free_if_unused(physical);
    }
    pthread_mutex_unlock(&state);
    return physical ? SUCCESS : INVALID_VALUE;
}

/* --- sharing ---------------------------------------------------------------------------------- */

Result cuMemExportToShareableHandle(int *out, void *handle, int type, unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&state);
    struct physical *physical = find_physical(handle);
    Result result = INVALID_VALUE;
    if (physical && !physical->imported && type == POSIX_DESCRIPTOR && physical->handle_types & type &&
        !flags) {
        *out = fcntl(physical->fd, F_DUPFD_CLOEXEC, 3);
        result = *out < 0 ? OUT_OF_MEMORY : SUCCESS;
    }
    pthread_mutex_unlock(&state);
    return result;
}

/* Which device a descriptor's memory is on; -1: the descriptor is not one that was exported. */
static int device_of_descriptor(int fd)
{
    char path[64];
    char target[128] = "";
    int device;

    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof target - 1) < 0)
        return -1;
    return sscanf(target, "/memfd:cuda-double-vmm-%d", &device) == 1 ? device : -1;
}

Result cuMemImportFromShareableHandle(void **out, void *descriptor, int type)
{
    ENTER(NEEDS_INIT);
    int fd = (int)(intptr_t)descriptor;
    int device = device_of_descriptor(fd);
    struct stat status;

    if (type != POSIX_DESCRIPTOR)
        return NOT_SUPPORTED;
    if (device < 0 || fstat(fd, &status))
        return INVALID_VALUE;
    if (ordinal_of(device) < 0)
        return INVALID_DEVICE;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3); /* the caller closes the one that was passed */
    if (own < 0)
        return OUT_OF_MEMORY;
    pthread_mutex_lock(&state);
    *out = add_physical((struct physical){.fd = own,
                                          .device = device,
                                          .handle_types = POSIX_DESCRIPTOR,
                                          .imported = true,
                                          .size = (size_t)status.st_size,
                                          .handles = 1});
    pthread_mutex_unlock(&state);
    return SUCCESS;
}

Result cuMemRetainAllocationHandle(void **out, void *address)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&state);
    struct range *range = find_device_range((uintptr_t)address);
    bool found = range && range->kind == VIRTUAL_MAPPING;
    if (found) {
        range->physical->handles++;
        *out = range->physical;
    }
    pthread_mutex_unlock(&state);
    return found ? SUCCESS : INVALID_VALUE;
}

Result cuMemGetAllocationPropertiesFromHandle(struct allocation_properties *out, void *handle)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&state);
    struct physical *physical = find_physical(handle);
    if (physical)
        *out = (struct allocation_properties){
            .type = PINNED,
            .handle_types = physical->handle_types,
            .location = {LOCATION_DEVICE, ordinal_of(physical->device)},
        };
    pthread_mutex_unlock(&state);
    return physical ? SUCCESS : INVALID_VALUE;
}

/* --- addresses -------------------------------------------------------------------------------- */

/* Whether something is mapped between `base` and `base + bytes`. */
static bool anything_mapped(const char *base, size_t bytes)
{
    for (struct range *range = ranges; range; range = range->next)
        if (range->kind == VIRTUAL_MAPPING && base < range->base + range->size && range->base < base + bytes)
            return true;
    return false;
}

static struct range *reservation_around(const char *base, size_t bytes)
{
    for (struct range *range = ranges; range; range = range->next)
        if (range->kind == RESERVATION && base >= range->base && base + bytes <= range->base + range->size)
            return range;
    return NULL;
}

/* Whether whole mappings, one beside the other, fill the range. */
static bool filled_by_mappings(DevicePointer address, size_t bytes)
{
    DevicePointer next = address;

    while (next < address + bytes) {
        struct range *range = find_device_range(next);
        if (!range || range->kind != VIRTUAL_MAPPING || device_address(range->base) != next)
            return false;
        next += range->size;
    }
    return next == address + bytes;
}

static char *reserve_addresses(void *where, size_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (where ? MAP_FIXED : 0);

    return mmap(where, bytes, PROT_NONE, flags, -1, 0);
}

Result cuMemAddressReserve(DevicePointer *out, size_t bytes, size_t alignment, DevicePointer wish,
                           unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    (void)wish;
    if (flags || bytes == 0 || bytes % GRANULARITY_BYTES || alignment > GRANULARITY_BYTES)
        return INVALID_VALUE;
    char *region = reserve_addresses(NULL, bytes + GRANULARITY_BYTES);
    if (region == MAP_FAILED)
        return OUT_OF_MEMORY;
    uintptr_t aligned = ((uintptr_t)region + GRANULARITY_BYTES - 1) & ~(GRANULARITY_BYTES - 1);
    size_t before = aligned - (uintptr_t)region;
    if (before)
        munmap(region, before);
    if (before < GRANULARITY_BYTES)
        munmap((char *)aligned + bytes, GRANULARITY_BYTES - before);
    pthread_mutex_lock(&state);
    add_range((struct range){.kind = RESERVATION, .base = (char *)aligned, .size = bytes, .fd = -1});
    pthread_mutex_unlock(&state);
    *out = device_address((char *)aligned);
    return SUCCESS;
}

Result cuMemAddressFree(DevicePointer address, size_t bytes)
{
    ENTER(NEEDS_INIT);
    char *base = host_address(address);

    pthread_mutex_lock(&state);
    struct range *range = reservation_around(base, bytes);
    bool whole = range && range->base == base && range->size == bytes && !anything_mapped(base, bytes);
    if (whole) {
        take_range(range);
        munmap(base, bytes);
        free(range);
    }
    pthread_mutex_unlock(&state);
    return whole ? SUCCESS : INVALID_VALUE;
}

Result cuMemMap(DevicePointer address, size_t bytes, size_t offset, void *handle, unsigned long long flags)
{
    ENTER(NEEDS_INIT);
    char *base = host_address(address);
    Result result = INVALID_VALUE;

    if (flags || bytes == 0 || bytes % GRANULARITY_BYTES || offset % GRANULARITY_BYTES)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    struct physical *physical = find_physical(handle);
    if (physical && offset + bytes <= physical->size && reservation_around(base, bytes) &&
        !anything_mapped(base, bytes)) {
        int flags_here = MAP_SHARED | MAP_FIXED;
        result = OUT_OF_MEMORY;
        if (mmap(base, bytes, PROT_READ | PROT_WRITE, flags_here, physical->fd, (off_t)offset) !=
            MAP_FAILED) {
            physical->mappings++;
            add_range((struct range){.kind = VIRTUAL_MAPPING,
                                     .base = base,
                                     .size = bytes,
                                     .device = physical->device,
                                     .fd = -1,
                                     .physical = physical});
            result = SUCCESS;
        }
    }
    pthread_mutex_unlock(&state);
    return result;
}

/* Access by another device than the memory's own is refused: the double has no peers. */
Result cuMemSetAccess(DevicePointer address, size_t bytes, const struct access_description *descriptions,
                      size_t count)
{
    ENTER(NEEDS_INIT);
    if (count == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&state);
    Result result = filled_by_mappings(address, bytes) ? SUCCESS : INVALID_VALUE;
    for (DevicePointer next = address; result == SUCCESS && next < address + bytes;) {
        struct range *range = find_device_range(next);
        for (size_t i = 0; i < count && result == SUCCESS; i++) {
            struct location location = descriptions[i].location;
            if (location.type != LOCATION_DEVICE || ordinal_of(range->device) != location.id)
                result = INVALID_DEVICE;
            else
                range->access = descriptions[i].flags;
        }
        next += range->size;
    }
    pthread_mutex_unlock(&state);
    return result;
}

Result cuMemUnmap(DevicePointer address, size_t bytes)
{
    ENTER(NEEDS_INIT);
    pthread_mutex_lock(&state);
    Result result = INVALID_VALUE;
    if (filled_by_mappings(address, bytes)) {
        struct range *taken = NULL;
        for (DevicePointer next = address; next < address + bytes;) {
            struct range *range = find_device_range(next);
            next += range->size;
            take_range(range);
            range->next = taken;
            taken = range;
        }
        result = retire_memory(host_address(address), bytes);
        while (taken) {
            struct range *range = taken;
            taken = range->next;
            reserve_addresses(range->base, range->size);
            range->physical->mappings--;
            free_if_unused(range->physical);
            free(range);
        }
    }
    pthread_mutex_unlock(&state);
    return result;
}
