// Moves of KV between slots of a paged cache: V is copied, K is copied and rotated by one angle per move.
//
// Raw pointers and strides only, so that one source serves the CPU driver and a device. Slots are
// `block * block_size + offset`. A move's sources must not overlap its targets; its caller sees to that.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SPANFLOW_FN __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Inlined always, so that each caller compiles the loops for its own instruction set.
#define SPANFLOW_FN inline __attribute__((always_inline))
#else
#define SPANFLOW_FN inline
#endif

// The loop that follows carries nothing from one iteration to the next.
#if defined(__CUDACC__)
#define SPANFLOW_INDEPENDENT
#elif defined(__clang__)
#define SPANFLOW_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define SPANFLOW_INDEPENDENT _Pragma("GCC ivdep")
#else
#define SPANFLOW_INDEPENDENT
#endif

namespace spanflow {

// Strides of `[block, head, token, head_dim]`, in elements.
struct Strides {
    int64_t block, head, token, dim;
};

// A move: its blocks are `blocks[first_source ...]` and `blocks[first_target ...]` of the launch.
struct Move {
    int64_t first_source, first_target, num_tokens;
    int32_t source_offset, target_offset;
    int64_t table;  // which table of angles; below 0 the keys are copied as they are
};

// Tokens of a move that lie in one block on either side.
struct Run {
    int64_t source_block, target_block;
    int32_t source_offset, target_offset, count;
};

// What is rotated: pairs (i, i + num_pairs) for neox, otherwise (2i, 2i + 1), of the first 2 * num_pairs dimensions.
struct Pairs {
    int32_t num_pairs, neox;

    SPANFLOW_FN int64_t low(int64_t i) const { return neox ? i : 2 * i; }
    SPANFLOW_FN int64_t high(int64_t i) const { return neox ? i + num_pairs : 2 * i + 1; }
};

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

SPANFLOW_FN uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

SPANFLOW_FN float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Conversions without branches, so that loops over them vectorise; rounding is to nearest, ties to even.

SPANFLOW_FN float widen(float value) { return value; }

SPANFLOW_FN float widen(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

SPANFLOW_FN float widen(Float16 value) {
    const uint32_t rest = uint32_t(value.bits & 0x7fff) << 13;
    const uint32_t exponent = rest & (0x1fu << 23);
    const uint32_t normal = rest + (112u << 23);
    const uint32_t special = rest + (224u << 23);  // infinities and NaN
    const uint32_t tiny = bits_of(float_of(rest + (113u << 23)) - float_of(113u << 23));
    const uint32_t size = exponent == 0 ? tiny : exponent == (0x1fu << 23) ? special : normal;
    return float_of(size | uint32_t(value.bits & 0x8000) << 16);
}

SPANFLOW_FN void narrow(float value, float* out) { *out = value; }

SPANFLOW_FN void narrow(float value, BFloat16* out) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    out->bits = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0u : rounded);
}

SPANFLOW_FN void narrow(float value, Float16* out) {
    const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
    const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    // The last place of 0.5 in float32 is the smallest half: adding it rounds there.
    const uint32_t tiny = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    const uint32_t finite = size < (113u << 23) ? tiny : normal;
    const uint32_t half = size > 0x7f800000 ? 0x7e00u : size >= 0x477ff000 ? 0x7c00u : finite;
    out->bits = uint16_t(half | (bits >> 16 & 0x8000));
}

// The tokens from `token` on that lie in one block on either side, at most to the end of the target's block.
SPANFLOW_FN Run run_at(const Move& move, const int64_t* blocks, int64_t token, int32_t block_size) {
    const int64_t source = move.source_offset + token, target = move.target_offset + token;
    Run run;
    run.source_block = blocks[move.first_source + source / block_size];
    run.target_block = blocks[move.first_target + target / block_size];
    run.source_offset = int32_t(source % block_size);
    run.target_offset = int32_t(target % block_size);
    const int32_t later = run.source_offset > run.target_offset ? run.source_offset : run.target_offset;
    const int64_t left = move.num_tokens - token, room = block_size - later;
    run.count = int32_t(left < room ? left : room);
    return run;
}

template <class T>
SPANFLOW_FN void rotate_pair(const T& a, const T& b, float cos, float sin, T* low, T* high) {
    const float x = widen(a), y = widen(b);
    narrow(x * cos - y * sin, low);
    narrow(y * cos + x * sin, high);
}

// Copy dimensions `first` to `last` of `count` tokens of one head.
template <class T>
SPANFLOW_FN void copy(const T* from, T* to, const Strides& at, int32_t count, int32_t first, int32_t last) {
    if (at.dim == 1 && at.token == last - first) {
        memcpy(to + first, from + first, size_t(count) * size_t(last - first) * sizeof(T));
    } else if (at.dim == 1) {
        for (int64_t t = 0; t < count; ++t)
            memcpy(to + t * at.token + first, from + t * at.token + first, size_t(last - first) * sizeof(T));
    } else {
        for (int64_t d = first; d < last; ++d) {
            const T* a = from + d * at.dim;
            T* x = to + d * at.dim;
            if (at.token == 1)
                memcpy(x, a, size_t(count) * sizeof(T));
            else
                for (int64_t t = 0; t < count; ++t) x[t * at.token] = a[t * at.token];
        }
    }
}

// Copy `count` tokens of one head, rotated by `table`: cos, then sin, of `num_pairs` angles each.
template <class T>
SPANFLOW_FN void rotate(const T* from, T* to, const Strides& at, int32_t count, const Pairs& pairs,
                        const float* table) {
    const float *cos = table, *sin = table + pairs.num_pairs;
    if (at.dim != 1) {  // transposed: along the tokens
        for (int64_t i = 0; i < pairs.num_pairs; ++i) {
            const int64_t low = pairs.low(i) * at.dim, high = pairs.high(i) * at.dim;
            const T *a = from + low, *b = from + high;
            T *x = to + low, *y = to + high;
            const float c = cos[i], s = sin[i];
            if (at.token == 1) {
                SPANFLOW_INDEPENDENT
                for (int64_t t = 0; t < count; ++t) rotate_pair(a[t], b[t], c, s, x + t, y + t);
            } else {
                for (int64_t t = 0; t < count; ++t) {
                    const int64_t place = t * at.token;
                    rotate_pair(a[place], b[place], c, s, x + place, y + place);
                }
            }
        }
        return;
    }
    for (int64_t t = 0; t < count; ++t) {  // token-major: along the dimensions
        const T* a = from + t * at.token;
        T* x = to + t * at.token;
        const int64_t n = pairs.num_pairs;
        if (pairs.neox) {
            SPANFLOW_INDEPENDENT
            for (int64_t i = 0; i < n; ++i) rotate_pair(a[i], a[i + n], cos[i], sin[i], x + i, x + i + n);
        } else {
            SPANFLOW_INDEPENDENT
            for (int64_t i = 0; i < n; ++i)
                rotate_pair(a[2 * i], a[2 * i + 1], cos[i], sin[i], x + 2 * i, x + 2 * i + 1);
        }
    }
}

}  // namespace spanflow
