/* Our layouts and numbers against NVIDIA's header, wherever the compiler finds one; nothing otherwise. */
#include "double.h"

#if __has_include(<cuda.h>)
#include <cuda.h>

#define SAME(ours, theirs) _Static_assert((long)(ours) == (long)(theirs), #theirs)

SAME(sizeof(struct location), sizeof(CUmemLocation));
SAME(sizeof(struct allocation_properties), sizeof(CUmemAllocationProp));
SAME(offsetof(struct allocation_properties, handle_types),
     offsetof(CUmemAllocationProp, requestedHandleTypes));
SAME(offsetof(struct allocation_properties, location), offsetof(CUmemAllocationProp, location));
SAME(sizeof(struct access_description), sizeof(CUmemAccessDesc));
SAME(offsetof(struct access_description, flags), offsetof(CUmemAccessDesc, flags));
SAME(sizeof(struct copy_attributes), sizeof(CUmemcpyAttributes));
SAME(offsetof(struct copy_attributes, flags), offsetof(CUmemcpyAttributes, flags));
SAME(sizeof(struct ipc_handle), sizeof(CUipcMemHandle));
SAME(sizeof(struct ipc_handle), sizeof(CUipcEventHandle));
SAME(16, sizeof(CUuuid));
SAME(SOURCE_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
SAME(SOURCE_ORDER_DURING_CALL, CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL);
SAME(SOURCE_ORDER_ANY, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
SAME(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(EVENT_INTERPROCESS, CU_EVENT_INTERPROCESS);
SAME(ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME(ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(REGISTER_READ_ONLY, CU_MEMHOSTREGISTER_READ_ONLY);
SAME(1, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(1, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(1, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(1, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
SAME(0, CU_STREAM_WAIT_VALUE_GEQ);
SAME(3, CU_STREAM_WAIT_VALUE_NOR);
SAME(103, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(113, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED);
SAME(125, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
SAME(HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
SAME(LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED);
SAME(ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE);
#endif
