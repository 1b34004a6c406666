// The CPU driver: many pieces on many layers in one launch, split over threads by layer and target block.

#include "rerope_mover.h"

#include <atomic>

#if !defined(_OPENMP)
#include <thread>
#include <vector>
#endif

using namespace spanflow;

// Mirrored field by field in cpu.py.
struct CpuLaunch {
    Launch launch;
    const int64_t* chunks;  // [num_chunks + 1]: the first piece of each; those of one share target block and table
    int64_t num_chunks;
    int32_t num_threads;
    int32_t past_caches;
};

namespace {

// Small portions, handed out as threads come for more: a thread that is held up does not hold up the others.
struct Portions {
    int64_t size, total;
    std::atomic<int64_t> next{0};
};

template <class T, bool kPast>
void work(const CpuLaunch& asked, Portions& portions) {
    const Mover<T, kPast> mover(asked.launch);
    for (;;) {
        const int64_t first = portions.next.fetch_add(portions.size, std::memory_order_relaxed);
        if (first >= portions.total) break;
        const int64_t last = std::min(first + portions.size, portions.total);
        for (int64_t at = first; at < last; ++at) {
            const int64_t chunk = at % asked.num_chunks;
            mover.move(at / asked.num_chunks, asked.launch.pieces + asked.chunks[chunk],
                       asked.launch.pieces + asked.chunks[chunk + 1]);
        }
    }
    if (kPast) end_streams();
}

using Work = void (*)(const CpuLaunch&, Portions&);

Work choose(const CpuLaunch& asked) {
    switch (asked.launch.type) {
        case kFloat32: return asked.past_caches ? work<float, true> : work<float, false>;
        case kBFloat16: return asked.past_caches ? work<BFloat16, true> : work<BFloat16, false>;
        default: return asked.past_caches ? work<Float16, true> : work<Float16, false>;
    }
}

constexpr int64_t kLargestPortion = 16;

}  // namespace

#define SPANFLOW_EXPORT extern "C" __attribute__((visibility("default")))

// What the library was built from.
SPANFLOW_EXPORT const char* spanflow_rerope_digest() { return SPANFLOW_DIGEST; }

SPANFLOW_EXPORT void spanflow_rerope_run(const CpuLaunch* asked) {
    Portions portions;
    portions.total = asked->launch.num_layers * asked->num_chunks;
    portions.size = std::clamp<int64_t>(portions.total / (4 * asked->num_threads), 1, kLargestPortion);
    const int num_threads = int(std::min<int64_t>(asked->num_threads, portions.total));
    const Work run = choose(*asked);
    if (num_threads <= 1) {
        run(*asked, portions);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads)
    run(*asked, portions);
#else
    std::vector<std::thread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back([&] { run(*asked, portions); });
    run(*asked, portions);
    for (std::thread& thread : threads) thread.join();
#endif
}
