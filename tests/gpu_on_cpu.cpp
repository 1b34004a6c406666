// The device kernel's source on the host: a loop over the blocks and threads of a launch.

#include "rerope_gpu.h"

using namespace spanflow;

template <class T>
static void run(const GpuLaunch& asked, int64_t num_blocks) {
    for (int64_t block = 0; block < num_blocks; ++block)
        for (int32_t thread = 0; thread < kThreads; ++thread) run_thread<T>(asked, block, thread);
}

extern "C" void run_on_cpu(const GpuLaunch* asked, int64_t num_blocks) {
    switch (asked->launch.type) {
        case kFloat32: run<float>(*asked, num_blocks); break;
        case kBFloat16: run<BFloat16>(*asked, num_blocks); break;
        default: run<Float16>(*asked, num_blocks);
    }
}
