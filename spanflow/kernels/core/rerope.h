// Moves of KV between slots of a paged cache: V is copied, K is copied and rotated by one angle per move.
//
// What the CPU driver (rerope_cpu.cpp) and the device kernel (rerope_gpu.h) share: how a launch is described, where
// a token lies, how a pair of dimensions is rotated. Raw pointers and strides only.
#pragma once

#if defined(__CUDACC_RTC__)  // no header of a toolkit is needed at run time
typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
#else
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__)
#define SPANFLOW_FN __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define SPANFLOW_FN inline __attribute__((always_inline))
#else
#define SPANFLOW_FN inline
#endif

namespace spanflow {

// Strides of `[block, head, token, head_dim]`, in elements.
struct Strides {
    int64_t block, head, token, dim;
};

// K or V of all layers: the pool's blocks, then those of scratch, each an address a layer. Scratch differs in its
// stride from block to block alone.
struct Cache {
    void* const* pool;
    void* const* scratch;
    Strides at;
    int64_t scratch_block;
};

// Tokens that lie in one block on either side. Blocks count on from the pool's into scratch.
struct Piece {
    int32_t source, target;
    int32_t source_offset, target_offset, count;
    int32_t table;  // which table of angles; below 0 the keys are copied as they are
};

// What is rotated: pairs (i, i + num_pairs) for neox, otherwise (2i, 2i + 1), of the first 2 * num_pairs dimensions.
struct Pairs {
    int32_t num_pairs, neox;

    SPANFLOW_FN int64_t low(int64_t i) const { return neox ? i : 2 * i; }
    SPANFLOW_FN int64_t high(int64_t i) const { return neox ? i + num_pairs : 2 * i + 1; }
};

enum Type { kFloat32, kBFloat16, kFloat16 };

// One launch: all pieces on all layers. No piece reads or writes what another one writes. Mirrored field by field in
// launch.py; the digest of this source tells whether a library fits.
struct Launch {
    Cache keys, values;
    const Piece* pieces;   // [num_pieces]
    const float* tables;   // [num_tables, 2, num_pairs]: cos, sin
    int64_t num_pieces;
    int32_t num_layers, num_blocks, num_heads, block_size, head_dim;
    int32_t type;
    Pairs pairs;
};

// Where a token of a head begins.
template <class T>
SPANFLOW_FN T* place(const Cache& cache, const Launch& launch, int64_t layer, int64_t block, int64_t head,
                     int64_t token) {
    const int64_t within = head * cache.at.head + token * cache.at.token;
    return block < launch.num_blocks
               ? static_cast<T*>(cache.pool[layer]) + block * cache.at.block + within
               : static_cast<T*>(cache.scratch[layer]) + (block - launch.num_blocks) * cache.scratch_block + within;
}

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

template <class To, class From>
SPANFLOW_FN To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits, otherwise read");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Conversions without branches, for one number (float, uint32_t, int32_t) or for a vector of them; rounding is to
// nearest, ties to even.

template <class F, class U>
SPANFLOW_FN F widen_float16(U half) {
    const U rest = (half & 0x7fff) << 13;
    const U exponent = rest & (0x1f << 23);
    const U normal = rest + (112 << 23);
    const U special = rest + (224 << 23);  // infinities and NaN
    const U tiny = bits_as<U>(bits_as<F>(rest + (113 << 23)) - bits_as<F>(rest * 0 + (113 << 23)));
    const U size = exponent == 0 ? tiny : exponent == (0x1f << 23) ? special : normal;
    return bits_as<F>(size | (half & 0x8000) << 16);
}

// In the upper half of the result. A NaN stays one: it comes from a bfloat16, whose lower half is 0.
template <class U, class F>
SPANFLOW_FN U round_bfloat16(F value) {
    const U bits = bits_as<U>(value);
    return bits + 0x7fff + (bits >> 16 & 1);
}

template <class U, class I, class F>
SPANFLOW_FN U narrow_float16(F value) {
    const U bits = bits_as<U>(value);
    const U size = bits & 0x7fffffff;
    const I compared = bits_as<I>(size);
    const U normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    // The last place of 0.5 in float32 is the smallest half: adding it rounds there.
    const F half = bits_as<F>(size * 0 + 0x3f000000);
    const U tiny = bits_as<U>(bits_as<F>(size) + half) - bits_as<U>(half);
    const U finite = compared < (113 << 23) ? tiny : normal;
    const U most = compared >= 0x477ff000 ? (bits & 0) + 0x7c00 : finite;
    return (compared > 0x7f800000 ? (bits & 0) + 0x7e00 : most) | (bits >> 16 & 0x8000);
}

SPANFLOW_FN float widen(float value) { return value; }
SPANFLOW_FN void narrow(float value, float* out) { *out = value; }

#if defined(__CUDA_ARCH__)  // the same results, by instructions of sm_80 and later

SPANFLOW_FN float widen(BFloat16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }
SPANFLOW_FN float widen(Float16 value) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(value.bits));
    return out;
}
SPANFLOW_FN void narrow(float value, BFloat16* out) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
}
SPANFLOW_FN void narrow(float value, Float16* out) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
}

#else

SPANFLOW_FN float widen(BFloat16 value) { return bits_as<float>(uint32_t(value.bits) << 16); }
SPANFLOW_FN float widen(Float16 value) { return widen_float16<float>(uint32_t(value.bits)); }
SPANFLOW_FN void narrow(float value, BFloat16* out) { out->bits = uint16_t(round_bfloat16<uint32_t>(value) >> 16); }
SPANFLOW_FN void narrow(float value, Float16* out) { out->bits = uint16_t(narrow_float16<uint32_t, int32_t>(value)); }

#endif

template <class T>
SPANFLOW_FN void rotate_pair(const T& a, const T& b, float cos, float sin, T* low, T* high) {
    const float x = widen(a), y = widen(b);
    narrow(x * cos - y * sin, low);
    narrow(y * cos + x * sin, high);
}

}  // namespace spanflow
