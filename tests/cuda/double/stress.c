/* A program of its own that tries the double with threads, to be built with a sanitizer.
 *
 * Each thread allocates, fills, copies in batches, orders its streams by events, maps and unmaps virtual
 * memory and frees all. It ends with "clean" if every byte was right and nothing is held in the end.
 */
#define _GNU_SOURCE
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "entry_points.h"

#define THREADS 4
#define ROUNDS 40
#define PIECES 16
#define PIECE_BYTES 4096ul
#define BUFFER_BYTES (PIECES * PIECE_BYTES)

static struct context *context;

static void must(Result result, int line)
{
    if (result != SUCCESS) {
        fprintf(stderr, "line %d: error %d\n", line, result);
        exit(1);
    }
}
#define MUST(call) must((call), __LINE__)

static void expect_all(const char *host, unsigned char byte)
{
    for (size_t i = 0; i < BUFFER_BYTES; i++)
        if ((unsigned char)host[i] != byte) {
            fprintf(stderr, "byte %zu is %d, not %d\n", i, host[i], byte);
            exit(1);
        }
}

/* Fill in one stream; gather in another that waits for the first one's event. */
static void fill_and_gather(DevicePointer memory, char *host, unsigned char byte, void *filling,
                            void *gathering)
{
    DevicePointer to[PIECES];
    DevicePointer from[PIECES];
    size_t sizes[PIECES];
    struct copy_attributes attributes = {.source_order = SOURCE_ORDER_STREAM};
    size_t first = 0;
    void *event;

    for (size_t i = 0; i < PIECES; i++) {
        to[i] = (uintptr_t)host + i * PIECE_BYTES;
        from[i] = memory + (PIECES - 1 - i) * PIECE_BYTES;
        sizes[i] = PIECE_BYTES;
    }
    MUST(cuEventCreate(&event, EVENT_DISABLE_TIMING));
    MUST(cuMemsetD8Async(memory, byte, BUFFER_BYTES, filling));
    MUST(cuEventRecord(event, filling));
    MUST(cuStreamWaitEvent(gathering, event, 0));
    MUST(cuEventDestroy(event));
    MUST(cuMemcpyBatchAsync(to, from, sizes, PIECES, &attributes, &first, 1, gathering));
    MUST(cuStreamSynchronize(gathering));
    expect_all(host, byte);
}

/* Make exportable memory, import it from its descriptor, write through one mapping and read the other. */
static void share_virtual(char *host, unsigned char byte, void *stream)
{
    struct allocation_properties properties = {.type = 1, .handle_types = 1, .location = {1, 0}};
    struct access_description access = {{1, 0}, ACCESS_READ_WRITE};
    DevicePointer address;
    void *made;
    void *imported;
    int fd;

    MUST(cuMemCreate(&made, GRANULARITY_BYTES, &properties, 0));
    MUST(cuMemExportToShareableHandle(&fd, made, 1, 0));
    MUST(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)fd, 1));
    close(fd);
    MUST(cuMemAddressReserve(&address, 2 * GRANULARITY_BYTES, 0, 0, 0));
    MUST(cuMemMap(address, GRANULARITY_BYTES, 0, made, 0));
    MUST(cuMemMap(address + GRANULARITY_BYTES, GRANULARITY_BYTES, 0, imported, 0));
    MUST(cuMemRelease(made));
    MUST(cuMemRelease(imported));
    MUST(cuMemSetAccess(address, 2 * GRANULARITY_BYTES, &access, 1));
    MUST(cuMemsetD8Async(address, byte, BUFFER_BYTES, stream));
    MUST(cuMemcpyDtoHAsync(host, address + GRANULARITY_BYTES, BUFFER_BYTES, stream));
    MUST(cuStreamSynchronize(stream));
    expect_all(host, byte);
    MUST(cuMemUnmap(address, 2 * GRANULARITY_BYTES));
    MUST(cuMemAddressFree(address, 2 * GRANULARITY_BYTES));
}

static void *try(void *argument)
{
    unsigned char seed = (unsigned char)(uintptr_t)argument;

    MUST(cuCtxSetCurrent(context));
    for (int round = 0; round < ROUNDS; round++) {
        unsigned char byte = (unsigned char)(seed * ROUNDS + round);
        DevicePointer memory;
        void *host;
        void *filling;
        void *gathering;
        MUST(cuMemAlloc(&memory, BUFFER_BYTES));
        MUST(cuMemHostAlloc(&host, BUFFER_BYTES, 0));
        MUST(cuStreamCreate(&filling, 1));
        MUST(cuStreamCreate(&gathering, 1));
        fill_and_gather(memory, host, byte, filling, gathering);
        share_virtual(host, (unsigned char)~byte, filling);
        MUST(cuMemcpyHtoDAsync(memory, host, BUFFER_BYTES, filling));
        MUST(cuStreamDestroy(filling));
        MUST(cuStreamSynchronize(gathering));
        MUST(cuStreamDestroy(gathering));
        MUST(cuCtxSynchronize());
        MUST(cuMemFree(memory));
        MUST(cuMemFreeHost(host));
    }
    return NULL;
}

int main(void)
{
    static const char *const held[] = {"allocations",  "mappings", "reservations", "handles",
                                       "device_bytes", "streams",  "events",       "host_allocations",
                                       "pinned_bytes", "pending"};
    pthread_t threads[THREADS];

    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&context, 0));
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, try, (void *)i);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (cuda_double_count(held[i])) {
            fprintf(stderr, "%ld %s are held in the end\n", cuda_double_count(held[i]), held[i]);
            return 1;
        }
    puts("clean");
    return 0;
}
