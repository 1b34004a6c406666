// The CPU driver: many moves on many layers in one launch, split over threads by layer and target block.
//
// Built without -march: the loops are compiled once for any CPU and once for AVX2, and chosen when run.

#include "rerope.h"

#include <algorithm>
#include <atomic>

#if defined(_OPENMP)
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define SPANFLOW_AVX2 __attribute__((target("avx2")))
#endif

using spanflow::Move;
using spanflow::Pairs;
using spanflow::Run;
using spanflow::Strides;

// Mirrored field by field in cpu.py; the digest of this source tells whether a library fits.
struct Launch {
    void* const* keys;         // [num_layers]
    void* const* values;       // [num_layers]
    const Move* moves;         // [num_moves]
    const int64_t* chunks;     // [num_moves + 1]: target blocks before each move
    const int64_t* blocks;     // block ids of all moves
    const float* tables;       // [num_tables, 2, num_pairs]: cos, sin
    Strides key_strides, value_strides;
    int64_t num_layers, num_moves;
    int32_t dtype;             // 0 float32, 1 bfloat16, 2 float16
    int32_t num_heads, block_size, head_dim;
    Pairs pairs;
    int32_t num_threads;
    int32_t plain;             // not 0: without AVX2
};

namespace {

// All heads of one layer for the tokens of a move that go to its `index`-th target block.
template <class T>
SPANFLOW_FN void move_chunk(const Launch& launch, int64_t layer, const Move& move, int64_t index) {
    const int64_t size = launch.block_size;
    const int64_t end = std::min((index + 1) * size - move.target_offset, move.num_tokens);
    const Strides &at_key = launch.key_strides, &at_value = launch.value_strides;
    T *keys = static_cast<T*>(launch.keys[layer]), *values = static_cast<T*>(launch.values[layer]);
    int64_t token = std::max<int64_t>(index * size - move.target_offset, 0);
    while (token < end) {
        const Run run = run_at(move, launch.blocks, token, launch.block_size);
        for (int64_t head = 0; head < launch.num_heads; ++head) {
            const T* from = keys + run.source_block * at_key.block + head * at_key.head + run.source_offset * at_key.token;
            T* to = keys + run.target_block * at_key.block + head * at_key.head + run.target_offset * at_key.token;
            int32_t rotated = 0;
            if (move.table >= 0) {
                const float* table = launch.tables + move.table * 2 * launch.pairs.num_pairs;
                rotate(from, to, at_key, run.count, launch.pairs, table);
                rotated = 2 * launch.pairs.num_pairs;
            }
            if (rotated < launch.head_dim) copy(from, to, at_key, run.count, rotated, launch.head_dim);
            from = values + run.source_block * at_value.block + head * at_value.head + run.source_offset * at_value.token;
            to = values + run.target_block * at_value.block + head * at_value.head + run.target_offset * at_value.token;
            copy(from, to, at_value, run.count, 0, launch.head_dim);
        }
        token += run.count;
    }
}

// Chunks `first` to `last` of all layers times all target blocks.
SPANFLOW_FN void move_chunks(const Launch& launch, int64_t first, int64_t last) {
    const int64_t* chunks = launch.chunks;
    const int64_t in_layer = chunks[launch.num_moves];
    for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t layer = chunk / in_layer, place = chunk % in_layer;
        const int64_t move = std::upper_bound(chunks, chunks + launch.num_moves + 1, place) - chunks - 1;
        const int64_t index = place - chunks[move];
        switch (launch.dtype) {
            case 0: move_chunk<float>(launch, layer, launch.moves[move], index); break;
            case 1: move_chunk<spanflow::BFloat16>(launch, layer, launch.moves[move], index); break;
            default: move_chunk<spanflow::Float16>(launch, layer, launch.moves[move], index);
        }
    }
}

void chunks_anywhere(const Launch& launch, int64_t first, int64_t last) { move_chunks(launch, first, last); }

#if defined(SPANFLOW_AVX2)
SPANFLOW_AVX2 void chunks_avx2(const Launch& launch, int64_t first, int64_t last) { move_chunks(launch, first, last); }
#endif

using Chunks = void (*)(const Launch&, int64_t, int64_t);

Chunks choose(bool plain) {
#if defined(SPANFLOW_AVX2)
    if (!plain && __builtin_cpu_supports("avx2")) return chunks_avx2;
#endif
    (void)plain;
    return chunks_anywhere;
}

// Small portions, handed out as threads come for more: a thread that is held up does not hold up the others.
constexpr int64_t kPortion = 16;

void work(const Launch& launch, Chunks chunks, std::atomic<int64_t>& next, int64_t total) {
    for (;;) {
        const int64_t first = next.fetch_add(kPortion, std::memory_order_relaxed);
        if (first >= total) return;
        chunks(launch, first, std::min(first + kPortion, total));
    }
}

}  // namespace

#define SPANFLOW_EXPORT extern "C" __attribute__((visibility("default")))

// What the library was built from.
SPANFLOW_EXPORT const char* spanflow_rerope_digest() { return SPANFLOW_DIGEST; }

SPANFLOW_EXPORT void spanflow_rerope_run(const Launch* launch) {
    const int64_t total = launch->num_layers * launch->chunks[launch->num_moves];
    const Chunks chunks = choose(launch->plain != 0);
    const int num_threads = int(std::min<int64_t>(launch->num_threads, (total + kPortion - 1) / kPortion));
    std::atomic<int64_t> next{0};
    if (num_threads <= 1) {
        work(*launch, chunks, next, total);
        return;
    }
#if defined(_OPENMP)
#pragma omp parallel num_threads(num_threads)
    work(*launch, chunks, next, total);
#else
    std::vector<std::thread> threads;
    for (int i = 1; i < num_threads; ++i) threads.emplace_back([&] { work(*launch, chunks, next, total); });
    work(*launch, chunks, next, total);
    for (std::thread& thread : threads) thread.join();
#endif
}
