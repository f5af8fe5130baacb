/* The driver's entry points that the double has, by the names under which cuGetProcAddress hands them out. */
#ifndef SEGUE_CUDA_DOUBLE_ENTRY_POINTS_H
#define SEGUE_CUDA_DOUBLE_ENTRY_POINTS_H

#include "double.h"

Result cuGetErrorName(Result result, const char **name);
Result cuGetErrorString(Result result, const char **text);
Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

/* devices.c */
Result cuInit(unsigned flags);
Result cuDriverGetVersion(int *version);
Result cuDeviceGetCount(int *count);
Result cuDeviceGet(int *device, int ordinal);
Result cuDeviceGetUuid(unsigned char *uuid, int ordinal);
Result cuDeviceGetName(char *name, int bytes, int ordinal);
Result cuDeviceTotalMem(size_t *bytes, int ordinal);
Result cuDeviceGetAttribute(int *value, int attribute, int ordinal);
Result cuDevicePrimaryCtxRetain(struct context **context, int ordinal);
Result cuDevicePrimaryCtxRelease(int ordinal);
Result cuDevicePrimaryCtxGetState(int ordinal, unsigned *flags, int *active);
Result cuCtxSetCurrent(struct context *context);
Result cuCtxGetCurrent(struct context **context);
Result cuCtxPushCurrent(struct context *context);
Result cuCtxPopCurrent(struct context **context);
Result cuCtxGetDevice(int *ordinal);
Result cuCtxGetDevice_v2(int *ordinal, struct context *context);

/* memory.c */
Result cuMemAlloc(DevicePointer *out, size_t bytes);
Result cuMemFree(DevicePointer address);
Result cuMemGetAddressRange(DevicePointer *base, size_t *size, DevicePointer address);
Result cuMemGetInfo(size_t *free_bytes, size_t *total_bytes);
Result cuPointerGetAttribute(void *out, int attribute, DevicePointer address);
Result cuPointerGetAttributes(unsigned count, int *attributes, void **out, DevicePointer address);
Result cuMemHostAlloc(void **out, size_t bytes, unsigned flags);
Result cuMemFreeHost(char *base);
Result cuMemHostRegister(char *base, size_t bytes, unsigned flags);
Result cuMemHostUnregister(char *base);
Result cuMemHostGetDevicePointer(DevicePointer *out, char *base, unsigned flags);

/* virtual.c */
Result cuMemGetAllocationGranularity(size_t *bytes, const struct allocation_properties *properties,
                                     int option);
Result cuMemCreate(void **out, size_t bytes, const struct allocation_properties *properties,
                   unsigned long long flags);
Result cuMemRelease(void *handle);
Result cuMemExportToShareableHandle(int *out, void *handle, int type, unsigned long long flags);
Result cuMemImportFromShareableHandle(void **out, void *descriptor, int type);
Result cuMemRetainAllocationHandle(void **out, void *address);
Result cuMemGetAllocationPropertiesFromHandle(struct allocation_properties *out, void *handle);
Result cuMemAddressReserve(DevicePointer *out, size_t bytes, size_t alignment, DevicePointer wish,
                           unsigned long long flags);
Result cuMemAddressFree(DevicePointer address, size_t bytes);
Result cuMemMap(DevicePointer address, size_t bytes, size_t offset, void *handle, unsigned long long flags);
Result cuMemSetAccess(DevicePointer address, size_t bytes, const struct access_description *descriptions,
                      size_t count);
Result cuMemUnmap(DevicePointer address, size_t bytes);

/* sharing.c */
Result cuIpcGetMemHandle(struct ipc_handle *out, DevicePointer address);
Result cuIpcOpenMemHandle(DevicePointer *out, struct ipc_handle handle, unsigned flags);
Result cuIpcCloseMemHandle(DevicePointer address);
Result cuIpcGetEventHandle(struct ipc_handle *out, void *handle);
Result cuIpcOpenEventHandle(void **out, struct ipc_handle handle);

/* streams.c */
Result cuStreamCreate(void **out, unsigned flags);
Result cuStreamCreateWithPriority(void **out, unsigned flags, int priority);
Result cuStreamDestroy(void *handle);
Result cuStreamQuery(void *handle);
Result cuStreamSynchronize(void *handle);
Result cuCtxGetStreamPriorityRange(int *least, int *greatest);
Result cuCtxSynchronize(void);
Result cuCtxSynchronize_v2(struct context *context);

/* events.c */
Result cuEventCreate(void **out, unsigned flags);
Result cuEventDestroy(void *handle);
Result cuEventRecord(void *handle, void *stream_handle);
Result cuEventQuery(void *handle);
Result cuEventSynchronize(void *handle);
Result cuStreamWaitEvent(void *stream_handle, void *handle, unsigned flags);

/* copies.c */
Result cuMemcpyHtoD(DevicePointer destination, const void *source, size_t bytes);
Result cuMemcpyDtoH(void *destination, DevicePointer source, size_t bytes);
Result cuMemcpyDtoD(DevicePointer destination, DevicePointer source, size_t bytes);
Result cuMemcpyHtoDAsync(DevicePointer destination, const void *source, size_t bytes, void *stream);
Result cuMemcpyDtoHAsync(void *destination, DevicePointer source, size_t bytes, void *stream);
Result cuMemcpyDtoDAsync(DevicePointer destination, DevicePointer source, size_t bytes, void *stream);
Result cuMemcpyBatchAsync(DevicePointer *destinations, DevicePointer *sources, size_t *sizes, size_t count,
                          struct copy_attributes *attributes, size_t *first, size_t entries,
                          void *stream_handle);
Result cuMemsetD8Async(DevicePointer destination, unsigned char fill, size_t bytes, void *stream_handle);
Result cuStreamWriteValue32(void *stream, DevicePointer address, uint32_t value, unsigned flags);
Result cuStreamWriteValue64(void *stream, DevicePointer address, uint64_t value, unsigned flags);
Result cuStreamWaitValue32(void *stream, DevicePointer address, uint32_t value, unsigned flags);
Result cuStreamWaitValue64(void *stream, DevicePointer address, uint64_t value, unsigned flags);

#endif
