/* Settings: what the double pretends to be, read from the environment once, before the first call. */
#include "double.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct settings settings = {
    .devices = 1,
    .memory_bytes = 1024ul << 20,
    .pinned_bytes = 1024ul << 20,
    .driver_version = 13000,
    .strict = true,
    .legacy_ipc = true,
    .vmm_descriptors = true,
    .read_only_register = true,
};

static pthread_once_t loaded = PTHREAD_ONCE_INIT;

static long number(const char *name, long otherwise, long most)
{
    const char *text = getenv(name);
    char *end;

    if (text == NULL)
        return otherwise;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || end == text || *end || value < 0 || value > most) {
        settings.mistake = name;
        return otherwise;
    }
    return value;
}

/* The position of a setting's word in `words`, which ends with NULL; 0 when it is not set. */
static int word(const char *name, const char *const words[])
{
    const char *text = getenv(name);

    if (text == NULL)
        return 0;
    for (int i = 0; words[i]; i++)
        if (!strcmp(words[i], text))
            return i;
    settings.mistake = name;
    return 0;
}

/* Every device has a UUID of its own that is the same in every process and whatever is visible. */
void uuid_of(int physical_device, unsigned char uuid[16])
{
    for (int i = 0; i < 16; i++)
        uuid[i] = (unsigned char)(0x5e + 17 * i + 101 * physical_device);
}

static void uuid_text(int physical_device, char text[48])
{
    unsigned char uuid[16];

    uuid_of(physical_device, uuid);
    int length = sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        length += sprintf(text + length, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

/* One item of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID. -1: no such device. */
static int device_named(const char *item)
{
    char text[48];

    for (int device = 0; device < settings.devices; device++) {
        uuid_text(device, text);
        bool by_uuid = !strncmp(item, "GPU-", 4) && !strncmp(text, item, strlen(item));
        bool by_index = *item >= '0' && *item <= '9' && atoi(item) == device;
        if (by_uuid || by_index)
            return device;
    }
    return -1;
}

/* As the driver does: devices after the first unknown one are not visible. */
static void read_visible_devices(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    char copy[512];
    char *rest;

    if (list == NULL) {
        for (int device = 0; device < settings.devices; device++)
            settings.visible[settings.visible_count++] = device;
        return;
    }
    snprintf(copy, sizeof copy, "%s", list);
    for (char *item = strtok_r(copy, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        int device = device_named(item);
        if (device < 0 || settings.visible_count == MAX_DEVICES)
            return;
        settings.visible[settings.visible_count++] = device;
    }
}

static void read_lacks(void)
{
    const char *list = getenv("CUDA_DOUBLE_LACKS");
    char copy[128];
    char *rest;

    snprintf(copy, sizeof copy, "%s", list ? list : "");
    for (char *item = strtok_r(copy, ",", &rest); item; item = strtok_r(NULL, ",", &rest)) {
        if (!strcmp(item, "ipc"))
            settings.legacy_ipc = false;
        else if (!strcmp(item, "vmm_fd"))
            settings.vmm_descriptors = false;
        else if (!strcmp(item, "read_only_register"))
            settings.read_only_register = false;
        else
            settings.mistake = "CUDA_DOUBLE_LACKS";
    }
}

static void read_environment(void)
{
    static const char *const memory_words[] = {"keep", "lose", NULL};
    static const char *const event_words[] = {"hang", "done", "fail", NULL};
    const char *failures = getenv("CUDA_DOUBLE_FAIL");

    settings.devices = (int)number("CUDA_DOUBLE_DEVICES", settings.devices, MAX_DEVICES);
    settings.memory_bytes = (size_t)number("CUDA_DOUBLE_MEM_MB", 1024, 1 << 20) << 20;
    settings.pinned_bytes = (size_t)number("CUDA_DOUBLE_PINNED_MB", 1024, 1 << 20) << 20;
    settings.op_us = number("CUDA_DOUBLE_OP_US", 0, 60 * 1000 * 1000);
    settings.megabytes_per_s = number("CUDA_DOUBLE_MBPS", 0, 1 << 20);
    settings.driver_version = (int)number("CUDA_DOUBLE_DRIVER", settings.driver_version, 99999);
    settings.strict = number("CUDA_DOUBLE_STRICT", 1, 1);
    settings.orphan_memory_faults = word("CUDA_DOUBLE_ORPHAN", memory_words) == 1;
    settings.orphan_event = (enum orphan_event)word("CUDA_DOUBLE_ORPHAN_EVENT", event_words);
    read_lacks();
    read_visible_devices();
    if (failures && set_failures(failures))
        settings.mistake = "CUDA_DOUBLE_FAIL";
    if (settings.mistake)
        fprintf(stderr, "CUDA double: cannot read %s=%s\n", settings.mistake, getenv(settings.mistake));
}

void load_settings(void)
{
    pthread_once(&loaded, read_environment);
}
