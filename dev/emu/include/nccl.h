// A stand-in for NCCL's nccl.h: what the project uses of it, with the real names, values and signatures. A rank
// is a process of this machine, with an emulated GPU of its own. ../README.md says what is checked.
#pragma once
#include <cstddef>
#include "cuda_runtime.h"

typedef struct ncclComm* ncclComm_t;

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5
} ncclResult_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;
typedef enum { ncclHalf = 6, ncclFloat = 7, ncclDouble = 8, ncclBfloat16 = 9 } ncclDataType_t;

const char* ncclGetErrorString(ncclResult_t result);
ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommDestroy(ncclComm_t comm);

// received (count) = the sum of all ranks' sent (count); they may be the same.
ncclResult_t ncclAllReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);
// received (count) = the rank-th part of the sum of all ranks' sent (ranks, count); it may be that part of sent.
ncclResult_t ncclReduceScatter(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream);
// received (ranks, count) = all ranks' sent (count), which may be the rank-th part of received.
ncclResult_t ncclAllGather(const void* sent, void* received, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
// received (count) of rank `root` = the sum of all ranks' sent (count), which may be the same; other ranks' received is
// not used.
ncclResult_t ncclReduce(const void* sent, void* received, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream);
// received (count) = sent (count) of rank `root`, which may be the same; the others' sent is not used.
ncclResult_t ncclBroadcast(const void* sent, void* received, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
// What is called between the two is queued as one operation by the second, and may run in any order.
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
