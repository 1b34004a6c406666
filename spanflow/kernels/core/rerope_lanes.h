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
constexpr int kLanes = kWidth / 4;  // floats in a vector
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

// A vector, written into the caches or past them; `to` is as aligned as the vector is large where it is past them.
template <bool kPast, class V>
SPANFLOW_FN void put_vector(const V& value, void* to) {
#if defined(__AVX512F__)
    if (kPast && sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(to), load<__m512i>(&value));
#endif
#if defined(__AVX__)
    if (kPast && sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(to), load<__m256i>(&value));
#endif
#if defined(__SSE2__)
    if (kPast && sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(to), load<__m128i>(&value));
#endif
    store(value, to);
}

SPANFLOW_FN void end_streams() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#if defined(__AVX512F__) && defined(__F16C__)
SPANFLOW_FN Floats widen_lanes(Halves half) { return bits_as<Floats>(_mm512_cvtph_ps(bits_as<__m256i>(half))); }
SPANFLOW_FN Halves narrow_lanes(Floats value) {
    return bits_as<Halves>(_mm512_cvtps_ph(bits_as<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__) && defined(__F16C__)
SPANFLOW_FN Floats widen_lanes(Halves half) { return bits_as<Floats>(_mm256_cvtph_ps(bits_as<__m128i>(half))); }
SPANFLOW_FN Halves narrow_lanes(Floats value) {
    return bits_as<Halves>(_mm256_cvtps_ph(bits_as<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}
#else
SPANFLOW_FN Floats widen_lanes(Halves half) {
    return widen_float16<Floats>(__builtin_convertvector(half, Words));
}
SPANFLOW_FN Halves narrow_lanes(Floats value) {
    return __builtin_convertvector((narrow_float16<Words, Ints>(value)), Halves);
}
#endif

// Numbers that are rotated in one step.
template <class T>
struct Step;
template <>
struct Step<float> {
    typedef Floats Vector;
};
template <>
struct Step<BFloat16> {
    typedef Words Vector;
};
template <>
struct Step<Float16> {
    typedef Halves Vector;
};
template <class T>
constexpr int kStep = sizeof(typename Step<T>::Vector) / sizeof(T);

struct Angles {
    Floats cos, sin;
};

template <class V>
struct Turned {
    V low, high;
};

SPANFLOW_FN Turned<Floats> turn(Floats x, Floats y, const Angles& by) {
    return {x * by.cos - y * by.sin, y * by.cos + x * by.sin};
}

// The second angles are those of a step's second half.
SPANFLOW_FN Turned<Floats> rotate_step(const float* a, const float* b, const Angles& by, const Angles&) {
    return turn(load<Floats>(a), load<Floats>(b), by);
}

SPANFLOW_FN Turned<Halves> rotate_step(const Float16* a, const Float16* b, const Angles& by, const Angles&) {
    const Turned<Floats> out = turn(widen_lanes(load<Halves>(a)), widen_lanes(load<Halves>(b)), by);
    return {narrow_lanes(out.low), narrow_lanes(out.high)};
}

// Neighbours share a word of 32 bits: each is a float once the other one is masked or shifted out, and none has to
// change its lane. The halves of a step are those numbers that lie low in their word, and those that lie high.
SPANFLOW_FN Turned<Words> rotate_step(const BFloat16* a, const BFloat16* b, const Angles& first, const Angles& second) {
    const Words x = load<Words>(a), y = load<Words>(b), upper = Words{} + 0xffff0000;
    const Turned<Floats> one = turn(bits_as<Floats>(x << 16), bits_as<Floats>(y << 16), first);
    const Turned<Floats> two = turn(bits_as<Floats>(x & upper), bits_as<Floats>(y & upper), second);
    return {(round_bfloat16<Words>(one.low) >> 16) | (round_bfloat16<Words>(two.low) & upper),
            (round_bfloat16<Words>(one.high) >> 16) | (round_bfloat16<Words>(two.high) & upper)};
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

// What lies `ahead` bytes further is wanted next.
SPANFLOW_FN void fetch_ahead(const void* from, int64_t ahead, size_t bytes) {
    const char* line = static_cast<const char*>(from) + ahead;
    for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(line + at);
}

template <bool kPast>
SPANFLOW_FN void copy_span(const void* source, void* target, size_t bytes, int64_t ahead) {
    const char* from = static_cast<const char*>(source);
    char* to = static_cast<char*>(target);
    if (!kPast || bytes < 2 * kLine) {
        fetch_ahead(from, ahead, bytes);
        copy_short(from, to, bytes);
        return;
    }
    const size_t first = -reinterpret_cast<uintptr_t>(to) % kLine;
    copy_short(from, to, first);
    struct alignas(kWidth) Part {
        char bytes[kWidth];
    };
    size_t at = first;
    for (; at + kLine <= bytes; at += kLine) {
        __builtin_prefetch(from + at + ahead);
        for (int i = 0; i < kLine; i += kWidth) put_vector<true>(load<Part>(from + at + i), to + at + i);
    }
    copy_short(from + at, to + at, bytes - at);
}

}  // namespace spanflow
