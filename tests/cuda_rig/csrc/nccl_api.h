// NCCL's interface without what its header includes for device code.
#pragma once
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <cuda_runtime_api.h>
#include <nccl.h>
