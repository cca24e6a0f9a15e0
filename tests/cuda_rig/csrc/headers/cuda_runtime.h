// CUDA's own header is for its compiler, and includes what comes with that.
#pragma once
#include <cuda_runtime_api.h>
