// The device kernel: a block of threads moves the keys, or the values, of one piece on one layer.
//
// Threads share nothing and never wait for each other, so a host that loops over blocks and threads runs the same
// source with the same results.
#pragma once

#include "rerope.h"

namespace spanflow {

constexpr int kThreads = 128;

// Mirrored field by field in cuda.py.
struct GpuLaunch {
    Launch launch;
    int32_t wide_keys, wide_values;  // whether all their vectors of 16 bytes are aligned
};

// What one access moves.
template <class T>
struct alignas(16) Vector {
    static constexpr int kSize = 16 / sizeof(T);
    T items[kSize];
};

template <class T>
SPANFLOW_FN Vector<T> load_vector(const T* from) {
    return *reinterpret_cast<const Vector<T>*>(from);
}

template <class T>
SPANFLOW_FN void store_vector(const Vector<T>& value, T* to) {
    *reinterpret_cast<Vector<T>*>(to) = value;
}

// Two places in the dimensions of a head that one thread takes together. Neighbouring threads have neighbouring ones.
struct Two {
    int32_t low, high;
    bool rotated;
};

// The `unit`-th two runs of `size` dimensions: first those that are rotated, `rotated` of them, then the others. Each
// part is cut in halves, so that with neox the two are a pair's.
SPANFLOW_FN Two two_at(int32_t unit, int32_t size, int32_t rotated, int32_t head_dim) {
    const int32_t first = unit * size;
    if (first < rotated / 2) return {first, first + rotated / 2, true};
    const int32_t rest = first - rotated / 2;
    // Of an odd number of dimensions the last one is alone.
    return {rotated + rest, rotated + rest + (head_dim - rotated + 1) / 2, false};
}

// Where a thread's `at`-th item is, so that neighbouring threads touch neighbouring memory.
struct Item {
    int32_t unit, head, token;
};

SPANFLOW_FN Item item_at(int64_t at, int32_t num_units, int32_t num_heads, int32_t count, const Strides& strides) {
    Item item;
    if (strides.token < strides.dim) {  // dimensions are rows of tokens
        item.token = int32_t(at % count);
        item.unit = int32_t(at / count % num_units);
        item.head = int32_t(at / count / num_units);
        return item;
    }
    item.unit = int32_t(at % num_units);
    const int32_t row = int32_t(at / num_units);
    const bool heads_first = strides.head < strides.token;
    item.head = heads_first ? row % num_heads : row / count;
    item.token = heads_first ? row / num_heads : row % count;
    return item;
}

template <class T>
SPANFLOW_FN void rotate_vectors(const Two& two, const Pairs& pairs, const float* cos, const float* sin, Vector<T>& low,
                                Vector<T>& high) {
    constexpr int kSize = Vector<T>::kSize;
    if (pairs.neox) {
#pragma unroll
        for (int k = 0; k < kSize; k += 4) {
            const Vector<float> c = load_vector(cos + two.low + k), s = load_vector(sin + two.low + k);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                rotate_pair(low.items[k + i], high.items[k + i], c.items[i], s.items[i], &low.items[k + i],
                            &high.items[k + i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kSize; i += 2) {
            const int32_t a = (two.low + i) / 2, b = (two.high + i) / 2;
            rotate_pair(low.items[i], low.items[i + 1], cos[a], sin[a], &low.items[i], &low.items[i + 1]);
            rotate_pair(high.items[i], high.items[i + 1], cos[b], sin[b], &high.items[i], &high.items[i + 1]);
        }
    }
}

// Vectors along the dimensions.
template <class T>
SPANFLOW_FN void move_wide(const Launch& launch, const Cache& cache, const Piece& piece, int64_t layer,
                           int32_t rotated, int32_t thread) {
    constexpr int kSize = Vector<T>::kSize;
    const int32_t num_units = launch.head_dim / (2 * kSize);
    const float* cos = launch.tables + int64_t(piece.table) * 2 * launch.pairs.num_pairs;
    const float* sin = cos + launch.pairs.num_pairs;
    const T* from = place<T>(cache, launch, layer, piece.source, 0, piece.source_offset);
    T* to = place<T>(cache, launch, layer, piece.target, 0, piece.target_offset);
    const int64_t total = int64_t(num_units) * launch.num_heads * piece.count;
    for (int64_t at = thread; at < total; at += kThreads) {
        const Item item = item_at(at, num_units, launch.num_heads, piece.count, cache.at);
        const int64_t row = item.head * cache.at.head + item.token * cache.at.token;
        const Two two = two_at(item.unit, kSize, rotated, launch.head_dim);
        Vector<T> low = load_vector(from + row + two.low), high = load_vector(from + row + two.high);
        if (two.rotated) rotate_vectors(two, launch.pairs, cos, sin, low, high);
        store_vector(low, to + row + two.low);
        store_vector(high, to + row + two.high);
    }
}

// Number by number, for any strides.
template <class T>
SPANFLOW_FN void move_narrow(const Launch& launch, const Cache& cache, const Piece& piece, int64_t layer,
                             int32_t rotated, int32_t thread) {
    const int32_t num_units = (launch.head_dim + 1) / 2;
    const Pairs& pairs = launch.pairs;
    const float* cos = launch.tables + int64_t(piece.table) * 2 * pairs.num_pairs;
    const float* sin = cos + pairs.num_pairs;
    const T* from = place<T>(cache, launch, layer, piece.source, 0, piece.source_offset);
    T* to = place<T>(cache, launch, layer, piece.target, 0, piece.target_offset);
    const int64_t total = int64_t(num_units) * launch.num_heads * piece.count;
    for (int64_t at = thread; at < total; at += kThreads) {
        const Item item = item_at(at, num_units, launch.num_heads, piece.count, cache.at);
        const int64_t row = item.head * cache.at.head + item.token * cache.at.token;
        const Two two = two_at(item.unit, 1, rotated, launch.head_dim);
        if (two.rotated) {
            const int64_t low = row + pairs.low(two.low) * cache.at.dim, high = row + pairs.high(two.low) * cache.at.dim;
            rotate_pair(from[low], from[high], cos[two.low], sin[two.low], to + low, to + high);
            continue;
        }
        to[row + two.low * cache.at.dim] = from[row + two.low * cache.at.dim];
        if (two.high < launch.head_dim) to[row + two.high * cache.at.dim] = from[row + two.high * cache.at.dim];
    }
}

SPANFLOW_FN int64_t num_blocks_of(const Launch& launch) { return 2 * int64_t(launch.num_layers) * launch.num_pieces; }

// What one thread of one block does: all keys of a layer's pieces come before all values.
template <class T>
SPANFLOW_FN void run_thread(const GpuLaunch& asked, int64_t block, int32_t thread) {
    const Launch& launch = asked.launch;
    const Piece piece = launch.pieces[block % launch.num_pieces];
    const int64_t part = block / launch.num_pieces;
    const int64_t layer = part / 2;
    const bool is_key = part % 2 == 0;
    const Cache& cache = is_key ? launch.keys : launch.values;
    const int32_t rotated = is_key && piece.table >= 0 ? 2 * launch.pairs.num_pairs : 0;
    if (is_key ? asked.wide_keys : asked.wide_values)
        move_wide<T>(launch, cache, piece, layer, rotated, thread);
    else
        move_narrow<T>(launch, cache, piece, layer, rotated, thread);
}

}  // namespace spanflow
