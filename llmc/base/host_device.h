// SLA_HOST_DEVICE marks what both host code and kernels call.
#pragma once

#ifdef __CUDACC__
#define SLA_HOST_DEVICE __host__ __device__
#else
#define SLA_HOST_DEVICE
#endif
