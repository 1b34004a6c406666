// Vectors as wide as the instruction set that is compiled for: pairs rotated in them, bytes copied with them.
#pragma once

#include "rerope.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace spanflow {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kWidth = 64;
#elif defined(__AVX2__)
constexpr int kWidth = 32;
#else
constexpr int kWidth = 16;
#endif
constexpr int kLanes = kWidth / 4;
constexpr int kLine = 64;

typedef float Floats __attribute__((vector_size(kWidth)));
typedef uint32_t Words __attribute__((vector_size(kWidth)));
typedef int32_t Ints __attribute__((vector_size(kWidth)));
typedef uint16_t Halves __attribute__((vector_size(kWidth / 2)));

template <class V>
SPANFLOW_FN V load(const void* from) {
    V out;
    memcpy(&out, from, sizeof out);
    return out;
}

template <class V>
SPANFLOW_FN void store(const V& value, void* to) {
    memcpy(to, &value, sizeof value);
}

SPANFLOW_FN Floats widen_lanes(const float* from) { return load<Floats>(from); }
SPANFLOW_FN void narrow_lanes(Floats value, float* to) { store(value, to); }

#if defined(__F16C__) && (defined(__AVX512F__) || defined(__AVX2__))
SPANFLOW_FN Floats widen_lanes(const Float16* from) {
#if defined(__AVX512F__)
    return bits_as<Floats>(_mm512_cvtph_ps(load<__m256i>(from)));
#else
    return bits_as<Floats>(_mm256_cvtph_ps(load<__m128i>(from)));
#endif
}
SPANFLOW_FN void narrow_lanes(Floats value, Float16* to) {
#if defined(__AVX512F__)
    store(_mm512_cvtps_ph(bits_as<__m512>(value), _MM_FROUND_TO_NEAREST_INT), to);
#else
    store(_mm256_cvtps_ph(bits_as<__m256>(value), _MM_FROUND_TO_NEAREST_INT), to);
#endif
}
#else
SPANFLOW_FN Floats widen_lanes(const Float16* from) {
    return widen_float16<Floats>(__builtin_convertvector(load<Halves>(from), Words));
}
SPANFLOW_FN void narrow_lanes(Floats value, Float16* to) {
    store(__builtin_convertvector((narrow_float16<Words, Ints>(value)), Halves), to);
}
#endif

// Pairs that are rotated in one step: as many as a vector holds, as numbers or as bfloat16.
template <class T>
constexpr int kStep = kLanes;
template <>
constexpr int kStep<BFloat16> = 2 * kLanes;

struct Angles {
    Floats cos, sin;
};

struct Turned {
    Floats low, high;
};

SPANFLOW_FN Turned turn(Floats x, Floats y, const Angles& by) {
    return {x * by.cos - y * by.sin, y * by.cos + x * by.sin};
}

// The second angles are those of a step's second half.
template <class T>
SPANFLOW_FN void rotate_step(const T* a, const T* b, const Angles& by, const Angles&, T* low, T* high) {
    const Turned out = turn(widen_lanes(a), widen_lanes(b), by);
    narrow_lanes(out.low, low);
    narrow_lanes(out.high, high);
}

// Neighbours share a word of 32 bits: each is a float once the other one is masked or shifted out, and none has to
// change its lane. The halves of a step are those numbers that lie low in their word, and those that lie high.
SPANFLOW_FN void rotate_step(const BFloat16* a, const BFloat16* b, const Angles& first, const Angles& second,
                             BFloat16* low, BFloat16* high) {
    const Words x = load<Words>(a), y = load<Words>(b);
    const Turned one = turn(bits_as<Floats>(x << 16), bits_as<Floats>(y << 16), first);
    const Turned two = turn(bits_as<Floats>(x & 0xffff0000), bits_as<Floats>(y & 0xffff0000), second);
    store((round_bfloat16<Words>(one.low) >> 16) | (round_bfloat16<Words>(two.low) & 0xffff0000), low);
    store((round_bfloat16<Words>(one.high) >> 16) | (round_bfloat16<Words>(two.high) & 0xffff0000), high);
}

// Numbers in the order in which steps take them.
template <class T>
SPANFLOW_FN void in_steps(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}
template <>
SPANFLOW_FN void in_steps<BFloat16>(const float* from, int64_t count, float* to) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    const int64_t high_in_word = 0;
#else
    const int64_t high_in_word = 1;
#endif
    const int64_t step = kStep<BFloat16>;
    for (int64_t i = 0; i < count; ++i) to[i / step * step + (i % 2 == high_in_word) * kLanes + i % step / 2] = from[i];
}

// A line, written past the caches. `to` begins one.
SPANFLOW_FN void stream_line(const char* from, char* to) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), load<__m512i>(from));
#elif defined(__AVX__)
    for (int i = 0; i < kLine; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), load<__m256i>(from + i));
#elif defined(__SSE2__)
    for (int i = 0; i < kLine; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), load<__m128i>(from + i));
#else
    memcpy(to, from, kLine);
#endif
}

SPANFLOW_FN void end_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// A few bytes, often and always as many: without a call.
template <size_t kSize>
SPANFLOW_FN bool copy_ends(const char* from, char* to, size_t bytes) {
    if (bytes < kSize) return false;
    struct Part {
        char bytes[kSize];
    };
    for (size_t at = 0; at + kSize <= bytes; at += kSize) store(load<Part>(from + at), to + at);
    store(load<Part>(from + bytes - kSize), to + bytes - kSize);
    return true;
}

SPANFLOW_FN void copy_short(const void* source, void* target, size_t bytes) {
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
    if (copy_ends<kWidth>(from, to, bytes) || copy_ends<kWidth / 2>(from, to, bytes) || copy_ends<8>(from, to, bytes) ||
        copy_ends<4>(from, to, bytes))
        return;
    copy_ends<2>(from, to, bytes);
}

template <bool kPast>
SPANFLOW_FN void copy_span(const void* source, void* target, size_t bytes) {
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
    if (!kPast || bytes < 2 * kLine) {
        copy_short(from, to, bytes);
        return;
    }
    const size_t first = -reinterpret_cast<uintptr_t>(to) % kLine;
    copy_short(from, to, first);
    size_t at = first;
    for (; at + kLine <= bytes; at += kLine) stream_line(from + at, to + at);
    copy_short(from + at, to + at, bytes - at);
}

}  // namespace spanflow
