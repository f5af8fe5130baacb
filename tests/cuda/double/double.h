/* A test double of the CUDA driver: a small libcuda.so.1 whose "device memory" is host memory.
 *
 * It stands at the driver's boundary, so that the real Python bindings and our own code run unchanged, across
 * real processes, on machines without a GPU. It proves our use of the interface (which calls, in which order,
 * in which thread, what is closed, what an error leads to); it never proves anything about hardware, speed or
 * the real driver's internals. Where CUDA leaves something undefined, the double does the worst thing
 * allowed. README.md lists the settings, the behaviours and the limits.
 *
 * One symbol of the driver is exported, cuGetProcAddress_v2; the other exports, cuda_double_*, are for tests.
 *
 * Invariant: what processes share is memory of a file descriptor (memfd), counted by the kernel, so a process
 * that is killed with SIGKILL leaves exactly what its peers still map, and nothing to clean up.
 *
 * Structures of destroyed objects stay allocated: a stale handle is recognised, never taken for another.
 */
#ifndef SEGUE_CUDA_DOUBLE_H
#define SEGUE_CUDA_DOUBLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* --- the driver's own types and numbers, by their values in the public header (layout.c compares)  */

typedef int Result;             /* CUresult */
typedef uint64_t DevicePointer; /* CUdeviceptr */

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ECC_UNCORRECTABLE = 214,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    UNKNOWN = 999,
};

struct location {
    int type; /* 1: a device */
    int id;
};

struct allocation_properties { /* CUmemAllocationProp */
    int type;                  /* 1: pinned */
    int handle_types;          /* 1: POSIX file descriptor */
    struct location location;
    void *windows_metadata;
    unsigned char flags[8];
};

struct access_description { /* CUmemAccessDesc */
    struct location location;
    int flags;
};

struct copy_attributes { /* CUmemcpyAttributes */
    int source_order;
    struct location source_hint;
    struct location destination_hint;
    unsigned flags;
};

enum { SOURCE_ORDER_STREAM = 1, SOURCE_ORDER_DURING_CALL = 2, SOURCE_ORDER_ANY = 3 };
enum { EVENT_DISABLE_TIMING = 2, EVENT_INTERPROCESS = 4 };
enum { ACCESS_READ = 1, ACCESS_READ_WRITE = 3 };
enum { REGISTER_READ_ONLY = 8 };

struct ipc_handle { /* CUipcMemHandle, CUipcEventHandle: 64 bytes, passed by value; the contents are ours */
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    int32_t device;
    uint64_t size;
    uint64_t inode;
    char unused[32];
};

/* --- settings --------------------------------------------------------------------------------- */

#define MAX_DEVICES 8
#define PAGE_BYTES 4096ul
#define GRANULARITY_BYTES (2ul << 20)

/* Device pointers are host addresses plus this, so that dereferencing one on the host faults. */
#define DEVICE_BIAS (1ull << 60)

enum orphan_event { ORPHAN_EVENT_HANGS, ORPHAN_EVENT_PASSES, ORPHAN_EVENT_FAILS };

struct settings {
    int devices; /* physical ones */
    int visible[MAX_DEVICES];
    int visible_count;
    size_t memory_bytes; /* of each device, counted per process */
    size_t pinned_bytes;
    long op_us;
    long megabytes_per_s; /* 0: as fast as memcpy */
    int driver_version;
    bool strict;
    bool legacy_ipc;
    bool vmm_descriptors;
    bool read_only_register;
    bool orphan_memory_faults;
    enum orphan_event orphan_event;
    const char *mistake; /* a setting that cannot be read: cuInit refuses */
};

extern struct settings settings;
void load_settings(void); /* reads the environment once */
void uuid_of(int physical_device, unsigned char uuid[16]);

/* --- calls: what every entry point does first (calls.c) --------------------------------------- */

enum needs { NEEDS_INIT, NEEDS_CONTEXT };

/* Counts the call; answers an injected error, or why the call cannot be made. */
Result enter(const char *entry_point, enum needs needs);

#define ENTER(needs)                                \
    do {                                            \
        Result refused_ = enter(__func__, (needs)); \
        if (refused_)                               \
            return refused_;                        \
    } while (0)

/* The error that an injection asked the queued work, not the call, to end with; 0 mostly. Taken once. */
int take_late_error(void);
int count_call(const char *entry_point); /* counts; the injected error or 0 */
int set_failures(const char *specification);
bool initialised(void); /* false before cuInit, and in a child after fork */
bool forked(void);      /* in a child after fork: CUDA is of no use there */
void set_initialised(void);

/* --- contexts (devices.c) --------------------------------------------------------------------- */

struct context { /* the primary context of one visible device */
    int ordinal;
    int device; /* physical */
    atomic_uint retained;
    atomic_int error; /* sticky: once set, every call in this context returns it and queued work is dropped */
};

extern _Thread_local struct context *current;
extern struct context primary_contexts[MAX_DEVICES];
bool valid_ordinal(int ordinal);
int ordinal_of(int physical_device); /* -1: not visible */
bool is_sticky(Result result);
void fail_context(struct context *context, Result error);
/* A failed context that nobody holds any more takes its imports, pinned host memory, streams and events with
 * it. */
void abandon_context(const struct context *context);

/* --- memory (memory.c); `state` protects every list in this file ------------------------------ */

extern pthread_mutex_t state;

enum range_kind {
    DEVICE_ALLOCATION,
    IPC_IMPORT,
    VIRTUAL_MAPPING,
    RESERVATION,
    HOST_ALLOCATION,
    HOST_REGISTRATION,
};

struct physical { /* what cuMemCreate makes, and an import of it */
    struct physical *next;
    int fd;
    int device;
    int handle_types;
    bool imported;
    size_t size;
    unsigned handles; /* not released yet */
    unsigned mappings;
};

struct range {
    struct range *next;
    enum range_kind kind;
    char *base;
    size_t size;
    uint64_t id;
    int device; /* physical; that of the context for host memory */
    int fd;
    bool exported;
    bool read_only; /* host memory that may not be written */
    /* of an import */
    unsigned opens;
    int exporter_pid;
    int exporter_pidfd;
    uint64_t inode;
    /* of a virtual mapping */
    struct physical *physical;
    int access;
};

extern struct range *ranges;
extern size_t used_bytes[MAX_DEVICES];
extern size_t pinned_used_bytes;

static inline bool is_device_address(DevicePointer address)
{
    return address >= DEVICE_BIAS;
}
static inline char *host_address(DevicePointer address)
{
    return (char *)(uintptr_t)(is_device_address(address) ? address - DEVICE_BIAS : address);
}
static inline DevicePointer device_address(const char *host)
{
    return (uintptr_t)host + DEVICE_BIAS;
}
static inline bool is_host_range(const struct range *range)
{
    return range->kind >= HOST_ALLOCATION;
}
static inline size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
}

/* All of these are called with `state` held. */
struct range *find_range(const char *address);          /* what is mapped or pinned there; no reservations */
struct range *find_device_range(DevicePointer address); /* the same, NULL for host memory */
struct range *add_range(struct range value);
void take_range(struct range *range); /* out of the list, so that nothing new uses it; the caller frees it */
int new_memory(const char *kind, int device, size_t bytes); /* a descriptor, or -1 */
bool process_gone(int pidfd);

extern struct physical *physicals; /* virtual.c */
extern long double_opens;          /* sharing.c: how often a handle was opened that was open already */

/* --- streams and events (streams.c, events.c) ------------------------------------------------- */

struct event_page {       /* shared between processes for an interprocess event */
    atomic_uint recorded; /* records asked for */
    atomic_uint done;     /* the latest record that was reached */
};

struct event {
    struct event *next;
    struct event_page *page;
    struct context *context;
    unsigned flags;
    int fd;             /* -1: not interprocess, or imported */
    int exporter_pidfd; /* -1: our own */
    bool imported;
    bool destroyed;
    unsigned queued; /* operations that still use the page */
};

enum operation_kind { COPY, FILL, SIGNAL_EVENT, WAIT_EVENT, WRITE_VALUE, WAIT_VALUE };

struct operation {
    struct operation *next;
    enum operation_kind kind;
    char *destination;  /* COPY, FILL, WRITE_VALUE */
    const char *source; /* COPY, WAIT_VALUE */
    size_t bytes;
    void *snapshot; /* COPY: the source as it was when the call was made, if it was read early */
    unsigned char fill;
    struct event *event;
    unsigned record;
    uint64_t value;
    unsigned comparison;
    bool first_of_call; /* bears the delay of a call */
    int error;          /* instead of doing it, the context fails with this */
};

struct stream {
    struct stream *next;
    struct context *context;
    unsigned flags;
    int priority;
    bool is_default; /* made when it is first used, never destroyed */
    bool destroyed;
    pthread_cond_t wake;
    struct operation *head; /* the one that runs stays here until it is done */
    struct operation *tail;
    uint64_t submitted;
    uint64_t completed;
};

extern struct stream *streams;
extern struct event *events;

/* Called with `state` held. A handle of 0, 1 or 2 is the default stream of the current context. */
struct stream *find_stream(void *handle);
bool is_default_stream(void *handle);
void enqueue(struct stream *stream, struct operation operation);
void drain_stream(struct stream *stream);
/* Before memory goes away: waits for all queued work; using it still is an illegal address in strict mode. */
Result retire_memory(const char *base, size_t bytes);
struct event *find_event(void *handle);
struct event *add_event(struct context *context, unsigned flags, int fd, int exporter_pidfd);
void release_event(struct event *event); /* frees the page of a destroyed event that nothing uses */

/* Called without `state`. */
void pause_us(long us);
void pass_gate(struct context *context, size_t wanted, size_t *granted);
void open_gate(void); /* wakes whoever waits at it, to look again */
void hold_streams(long bytes);
bool event_reached(struct event *event, unsigned record);
/* Whether waiting on an event is over because its process is dead; the context may have failed by it. */
bool orphan_wait_over(struct event *event, struct context *context);

/* --- for tests, through ctypes (calls.c) ------------------------------------------------------ */

EXPORT int cuda_double_fail(const char *specification);
EXPORT void cuda_double_hold(long bytes);
EXPORT long cuda_double_calls(const char *entry_point);
EXPORT long cuda_double_count(const char *what);

#endif
