// One kernel a type. Compiled at run time by NVRTC, and by nvcc in the tests.

#include "rerope_gpu.h"

using namespace spanflow;

#define SPANFLOW_KERNEL(name, type)                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads) name(const __grid_constant__ GpuLaunch asked) { \
        run_thread<type>(asked, blockIdx.x, threadIdx.x);                                                 \
    }

SPANFLOW_KERNEL(spanflow_rerope_float32, float)
SPANFLOW_KERNEL(spanflow_rerope_bfloat16, BFloat16)
SPANFLOW_KERNEL(spanflow_rerope_float16, Float16)
