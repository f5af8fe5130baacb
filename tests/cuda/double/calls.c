/* Calls: what every entry point does first, the errors that tests inject, and what tests may ask.
 *
 * Owns the counters and the injected failures. Never does what a call is for.
 */
#include "double.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_ENTRY_POINTS 256
#define MAX_FAILURES 32
#define NAME_BYTES 64
#define HANGS -1

struct counter {
    char name[NAME_BYTES];
    long calls;
};

struct failure {
    char name[NAME_BYTES]; /* an entry point, or "*" for any */
    long nth;              /* the nth call from now on; 0: every one */
    int code;   /* HANGS: the call does not return until the failures are set anew */
    bool late;  /* the call succeeds, the work that it queued fails */
    long seen;
};

static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER;
static struct counter counters[MAX_ENTRY_POINTS];
static struct failure failures[MAX_FAILURES];
static int failure_count;
static long failures_set; /* how often */
static pthread_cond_t failures_changed = PTHREAD_COND_INITIALIZER;
static atomic_bool shut_down; /* the driver, for good */
static atomic_int initialised_pid;
static _Thread_local int late_error;

static struct counter *counter_of(const char *name) /* calls_lock held */
{
    for (int i = 0; i < MAX_ENTRY_POINTS; i++) {
        if (!counters[i].name[0])
            snprintf(counters[i].name, NAME_BYTES, "%s", name);
        if (!strcmp(counters[i].name, name))
            return &counters[i];
    }
    return &counters[MAX_ENTRY_POINTS - 1];
}

static void hang(void) /* calls_lock held */
{
    long before = failures_set;

    while (failures_set == before)
        pthread_cond_wait(&failures_changed, &calls_lock);
}

int count_call(const char *entry_point)
{
    int code = 0;

    late_error = 0;
    pthread_mutex_lock(&calls_lock);
    counter_of(entry_point)->calls++;
    for (int i = 0; i < failure_count; i++) {
        struct failure *failure = &failures[i];
        if (strcmp(failure->name, "*") && strcmp(failure->name, entry_point))
            continue;
        failure->seen++;
        if (failure->nth && failure->nth != failure->seen)
            continue;
        if (failure->late)
            late_error = failure->code;
        else
            code = failure->code;
    }
    if (code == HANGS) {
        hang();
        code = 0;
    }
    pthread_mutex_unlock(&calls_lock);
    if (code == DEINITIALIZED)
        shut_down = true;
    return shut_down ? DEINITIALIZED : code;
}

int take_late_error(void)
{
    int error = late_error;

    late_error = 0;
    return error;
}

bool initialised(void)
{
    return initialised_pid == getpid();
}
bool forked(void)
{
    return initialised_pid && initialised_pid != getpid();
}
void set_initialised(void)
{
    initialised_pid = getpid();
}

Result enter(const char *entry_point, enum needs needs)
{
    if (forked()) /* first: locks may have been copied while they were held */
        return NOT_INITIALIZED;
    int injected = count_call(entry_point);
    if (shut_down)
        return injected;
    if (!initialised())
        return NOT_INITIALIZED;
    if (needs == NEEDS_CONTEXT) {
        if (current == NULL || current->retained == 0)
            return INVALID_CONTEXT;
        if (current->error)
            return current->error;
    }
    if (injected && current && is_sticky(injected))
        fail_context(current, injected);
    return injected;
}

/* "name:nth:code", "name:nth:code:late" or "name:nth:hang", separated by commas; replaces what was set, and ends
 * hangs. -1: cannot be read. */
int set_failures(const char *specification)
{
    char copy[1024];
    char *rest;
    int count = 0;
    struct failure read[MAX_FAILURES] = {0};

    if (strlen(specification) >= sizeof copy)
        return -1;
    strcpy(copy, specification);
    for (char *item = strtok_r(copy, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        char code[8] = "";
        char late[8] = "";
        if (count == MAX_FAILURES)
            return -1;
        struct failure *failure = &read[count++];
        int fields = sscanf(item, "%63[^:]:%ld:%7[^:]:%7s", failure->name, &failure->nth, code, late);
        failure->code = strcmp(code, "hang") ? atoi(code) : HANGS;
        if (fields < 3 || (fields == 4 && strcmp(late, "late")) || failure->code == 0 || failure->nth < 0)
            return -1;
        failure->late = fields == 4;
    }
    pthread_mutex_lock(&calls_lock);
    memcpy(failures, read, sizeof failures);
    failure_count = count;
    failures_set++;
    pthread_cond_broadcast(&failures_changed);
    pthread_mutex_unlock(&calls_lock);
    return 0;
}

/* --- what tests may ask and set through ctypes ------------------------------------------------ */

int cuda_double_fail(const char *specification)
{
    return set_failures(specification);
}

/* So many more bytes are moved by this process's streams, then everything stands still; -1: goes on. */
void cuda_double_hold(long bytes)
{
    hold_streams(bytes);
}

long cuda_double_calls(const char *entry_point)
{
    long total = 0;

    pthread_mutex_lock(&calls_lock);
    for (int i = 0; i < MAX_ENTRY_POINTS; i++)
        if (!strcmp(entry_point, "*") || !strcmp(entry_point, counters[i].name))
            total += counters[i].calls;
    pthread_mutex_unlock(&calls_lock);
    return total;
}

static long count_ranges(enum range_kind kind, bool opens)
{
    long total = 0;

    for (struct range *range = ranges; range; range = range->next)
        if (range->kind == kind)
            total += opens ? range->opens : 1;
    return total;
}

static long count_objects(const char *what) /* state held; -1: not a kind of object */
{
    long total = 0;

    if (!strcmp(what, "streams")) {
        for (struct stream *stream = streams; stream; stream = stream->next)
            total += !stream->destroyed && !stream->is_default;
    } else if (!strcmp(what, "pending")) {
        for (struct stream *stream = streams; stream; stream = stream->next)
            total += (long)(stream->submitted - stream->completed);
    } else if (!strcmp(what, "events")) {
        for (struct event *event = events; event; event = event->next)
            total += !event->destroyed;
    } else if (!strcmp(what, "handles")) {
        for (struct physical *physical = physicals; physical; physical = physical->next)
            total += physical->handles;
    } else if (!strcmp(what, "contexts")) {
        for (int i = 0; i < MAX_DEVICES; i++)
            total += primary_contexts[i].retained;
    } else if (!strcmp(what, "device_bytes")) {
        for (int i = 0; i < MAX_DEVICES; i++)
            total += (long)used_bytes[i];
    } else if (!strcmp(what, "pinned_bytes")) {
        total = (long)pinned_used_bytes;
    } else if (!strcmp(what, "double_opens")) {
        total = double_opens;
    } else {
        total = -1;
    }
    return total;
}

/* How many of something this process holds now; -1: no such thing. */
long cuda_double_count(const char *what)
{
    static const struct {
        const char *what;
        enum range_kind kind;
        bool opens;
    } kinds[] = {
        {"allocations", DEVICE_ALLOCATION, false},   {"imports", IPC_IMPORT, false},
        {"import_opens", IPC_IMPORT, true},          {"mappings", VIRTUAL_MAPPING, false},
        {"reservations", RESERVATION, false},        {"host_allocations", HOST_ALLOCATION, false},
        {"registrations", HOST_REGISTRATION, false},
    };
    long total = -1;

    pthread_mutex_lock(&state);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(what, kinds[i].what))
            total = count_ranges(kinds[i].kind, kinds[i].opens);
    if (total < 0)
        total = count_objects(what);
    pthread_mutex_unlock(&state);
    return total;
}
