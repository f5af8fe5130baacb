/* The table of entry points, and the one symbol through which every caller finds them: cuGetProcAddress_v2.
 *
 * A name is asked for together with the CUDA version whose interface is meant. What a driver does not have
 * is answered with NULL; an older driver (CUDA_DOUBLE_DRIVER) lacks what came after it.
 */
#include "double.h"

#include <string.h>

#include "entry_points.h"

static const struct {
    Result result;
    const char *name;
} error_names[] = {
    {SUCCESS, "CUDA_SUCCESS"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN"},
};

Result cuGetErrorName(Result result, const char **name)
{
    *name = NULL;
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].result == result)
            *name = error_names[i].name;
    return *name ? SUCCESS : INVALID_VALUE;
}

Result cuGetErrorString(Result result, const char **text)
{
    return cuGetErrorName(result, text);
}

#define SINCE(version, function, name) {name, version, (void *)(function)}
#define ENTRY(function) SINCE(0, function, #function)

static const struct {
    const char *name;
    int version;
    void *function;
} table[] = {
    /* where one name stands twice, the newer interface comes first */
    SINCE(13000, cuCtxGetDevice_v2, "cuCtxGetDevice"),
    SINCE(13000, cuCtxSynchronize_v2, "cuCtxSynchronize"),
    SINCE(13000, cuMemcpyBatchAsync, "cuMemcpyBatchAsync"),
    ENTRY(cuGetErrorName),
    ENTRY(cuGetErrorString),
    ENTRY(cuInit),
    ENTRY(cuDriverGetVersion),
    ENTRY(cuDeviceGetCount),
    ENTRY(cuDeviceGet),
    ENTRY(cuDeviceGetUuid),
    ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceTotalMem),
    ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuDevicePrimaryCtxRelease),
    ENTRY(cuDevicePrimaryCtxGetState),
    ENTRY(cuCtxSetCurrent),
    ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxPushCurrent),
    ENTRY(cuCtxPopCurrent),
    ENTRY(cuCtxGetDevice),
    ENTRY(cuCtxSynchronize),
    ENTRY(cuCtxGetStreamPriorityRange),
    ENTRY(cuMemAlloc),
    ENTRY(cuMemFree),
    ENTRY(cuMemGetAddressRange),
    ENTRY(cuMemGetInfo),
    ENTRY(cuPointerGetAttribute),
    ENTRY(cuPointerGetAttributes),
    ENTRY(cuMemHostAlloc),
    ENTRY(cuMemFreeHost),
    ENTRY(cuMemHostRegister),
    ENTRY(cuMemHostUnregister),
    ENTRY(cuMemHostGetDevicePointer),
    ENTRY(cuMemGetAllocationGranularity),
    ENTRY(cuMemCreate),
    ENTRY(cuMemRelease),
    ENTRY(cuMemExportToShareableHandle),
    ENTRY(cuMemImportFromShareableHandle),
    ENTRY(cuMemRetainAllocationHandle),
    ENTRY(cuMemGetAllocationPropertiesFromHandle),
    ENTRY(cuMemAddressReserve),
    ENTRY(cuMemAddressFree),
    ENTRY(cuMemMap),
    ENTRY(cuMemSetAccess),
    ENTRY(cuMemUnmap),
    ENTRY(cuIpcGetMemHandle),
    ENTRY(cuIpcOpenMemHandle),
    ENTRY(cuIpcCloseMemHandle),
    ENTRY(cuIpcGetEventHandle),
    ENTRY(cuIpcOpenEventHandle),
    ENTRY(cuStreamCreate),
    ENTRY(cuStreamCreateWithPriority),
    ENTRY(cuStreamDestroy),
    ENTRY(cuStreamQuery),
    ENTRY(cuStreamSynchronize),
    ENTRY(cuStreamWaitEvent),
    ENTRY(cuStreamWriteValue32),
    ENTRY(cuStreamWriteValue64),
    ENTRY(cuStreamWaitValue32),
    ENTRY(cuStreamWaitValue64),
    ENTRY(cuEventCreate),
    ENTRY(cuEventDestroy),
    ENTRY(cuEventRecord),
    ENTRY(cuEventQuery),
    ENTRY(cuEventSynchronize),
    ENTRY(cuMemcpyHtoD),
    ENTRY(cuMemcpyDtoH),
    ENTRY(cuMemcpyDtoD),
    ENTRY(cuMemcpyHtoDAsync),
    ENTRY(cuMemcpyDtoHAsync),
    ENTRY(cuMemcpyDtoDAsync),
    ENTRY(cuMemsetD8Async),
};

EXPORT Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    load_settings();
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table && *function == NULL; i++)
        if (!strcmp(name, table[i].name) && version >= table[i].version &&
            settings.driver_version >= table[i].version)
            *function = table[i].function;
    if (status)
        *status = *function == NULL; /* 0: found, 1: no such symbol */
    return *function ? SUCCESS : NOT_FOUND;
}
