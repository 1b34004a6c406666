// The CPU driver: many pieces on many layers in one launch, split over threads by layer and target block.
//
// Vectors are as wide as the instruction set it is compiled for. Keys are rotated in buffers that stay in the
// first cache, and leave from there in whole lines, past the caches where a launch is larger than they are: a store
// that first reads the line it is going to overwrite moves half as much again.

#include "rerope.h"

#include <algorithm>
#include <atomic>
#include <memory>

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#else
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
// change its lane. The halves of a step are its even and its odd numbers.
SPANFLOW_FN void rotate_step(const BFloat16* a, const BFloat16* b, const Angles& even, const Angles& odd, BFloat16* low,
                             BFloat16* high) {
    const Words x = load<Words>(a), y = load<Words>(b);
    const Turned one = turn(bits_as<Floats>(x << 16), bits_as<Floats>(y << 16), even);
    const Turned two = turn(bits_as<Floats>(x & 0xffff0000), bits_as<Floats>(y & 0xffff0000), odd);
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
    for (int64_t i = 0; i < count; ++i)
        to[i / kStep<BFloat16> * kStep<BFloat16> + i % 2 * kLanes + i % kStep<BFloat16> / 2] = from[i];
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

constexpr int kPairs = 8;  // rotated together
constexpr int kMostPieces = 8;

// Moves chunks of one launch: pieces that are neighbours in one target block and have one angle. One thread's.
template <class T, bool kPast>
class Mover {
   public:
    explicit Mover(const Launch& launch)
        : launch_(launch),
          row_(whole_steps(launch.block_size)),
          // Bytes for all, a line between them and one to begin at.
          buffer_(new char[sizeof(T) * (4 * kPairs * row_ + whole_steps(launch.head_dim)) +
                           sizeof(float) * 2 * whole_steps(launch.pairs.num_pairs) + 5 * kLine]()) {
        char* start = buffer_.get();
        read_ = next<T>(start, 2 * kPairs * row_);
        written_ = next<T>(start, std::max<int64_t>(2 * kPairs * row_, launch.head_dim));
        cos_ = next<float>(start, whole_steps(launch.pairs.num_pairs));
        sin_ = next<float>(start, whole_steps(launch.pairs.num_pairs));
    }

    void move(int64_t layer, const Piece* first, const Piece* last) const {
        const int32_t rotated = first->table < 0 ? 0 : 2 * launch_.pairs.num_pairs;
        const Strides& at = launch_.keys.at;
        if (at.dim == 1)
            keys_token_major(layer, first, last, rotated);
        else if (at.token == 1)
            by_rows(launch_.keys, layer, first, last, rotated);
        else
            keys_anyhow(layer, first, last, rotated);
        copy(launch_.values, layer, first, last, 0);
    }

   private:
    static int64_t whole_steps(int64_t count) { return (count + kStep<T> - 1) / kStep<T> * kStep<T>; }

    template <class N>
    static N* next(char*& start, int64_t count) {
        char* begin = start + -reinterpret_cast<uintptr_t>(start) % kLine;
        start = begin + count * int64_t(sizeof(N));
        return reinterpret_cast<N*>(begin);
    }

    const float* cos_of(const Piece& piece) const {
        return launch_.tables + int64_t(piece.table) * 2 * launch_.pairs.num_pairs;
    }
    const float* sin_of(const Piece& piece) const { return cos_of(piece) + launch_.pairs.num_pairs; }

    // Of the pairs from `i` on, which stand in the order of steps.
    Angles angles(int64_t i) const { return {load<Floats>(cos_ + i), load<Floats>(sin_ + i)}; }

    const T* source(const Cache& cache, int64_t layer, const Piece& piece, int64_t head) const {
        return place<T>(cache, launch_, layer, piece.source, head, piece.source_offset);
    }
    T* target(const Cache& cache, int64_t layer, const Piece& piece, int64_t head) const {
        return place<T>(cache, launch_, layer, piece.target, head, piece.target_offset);
    }

    // Dimensions from `begin` on, as they are.
    void copy(const Cache& cache, int64_t layer, const Piece* first, const Piece* last, int64_t begin) const {
        const Strides& at = cache.at;
        const int64_t dims = launch_.head_dim - begin;
        if (!dims) return;
        if (at.dim == 1) {
            for (const Piece* piece = first; piece < last; ++piece) copy_token_major(cache, layer, *piece, begin);
        } else if (at.token == 1 && !begin) {
            by_rows(cache, layer, first, last, 0);
        } else {
            for (const Piece* piece = first; piece < last; ++piece)
                for (int64_t head = 0; head < launch_.num_heads; ++head) {
                    const T* from = source(cache, layer, *piece, head);
                    T* to = target(cache, layer, *piece, head);
                    for (int64_t d = begin; d < launch_.head_dim; ++d)
                        for (int64_t t = 0; t < piece->count; ++t)
                            to[d * at.dim + t * at.token] = from[d * at.dim + t * at.token];
                }
        }
    }

    void copy_token_major(const Cache& cache, int64_t layer, const Piece& piece, int64_t begin) const {
        const Strides& at = cache.at;
        const int64_t dims = launch_.head_dim - begin, count = piece.count, heads = launch_.num_heads;
        const T* from = source(cache, layer, piece, 0) + begin;
        T* to = target(cache, layer, piece, 0) + begin;
        if (at.head == dims && at.token == heads * dims) {
            copy_span<kPast>(from, to, size_t(count * heads * dims) * sizeof(T));
        } else if (at.token == dims) {
            for (int64_t h = 0; h < heads; ++h)
                copy_span<kPast>(from + h * at.head, to + h * at.head, size_t(count * dims) * sizeof(T));
        } else {
            each_token(at, count, [&](int64_t place) {
                copy_span<kPast>(from + place, to + place, size_t(dims) * sizeof(T));
            });
        }
    }

    // All heads of some tokens, in the order in which they lie.
    template <class Do>
    SPANFLOW_FN void each_token(const Strides& at, int64_t count, Do&& run) const {
        const int64_t heads = launch_.num_heads;
        if (at.head < at.token) {
            for (int64_t t = 0; t < count; ++t)
                for (int64_t h = 0; h < heads; ++h) run(t * at.token + h * at.head);
        } else {
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t t = 0; t < count; ++t) run(t * at.token + h * at.head);
        }
    }

    void keys_token_major(int64_t layer, const Piece* first, const Piece* last, int64_t rotated) const {
        if (!rotated) {
            copy(launch_.keys, layer, first, last, 0);
            return;
        }
        const int64_t n = launch_.pairs.num_pairs, rest = launch_.head_dim - rotated;
        const bool neox = launch_.pairs.neox != 0;
        for (const Piece* piece = first; piece < last; ++piece) {
            const T* from = source(launch_.keys, layer, *piece, 0);
            T* to = target(launch_.keys, layer, *piece, 0);
            const float *cos = cos_of(*piece), *sin = sin_of(*piece);
            in_steps<T>(cos, n, cos_);
            in_steps<T>(sin, n, sin_);
            each_token(launch_.keys.at, piece->count, [&](int64_t place) {
                const T* a = from + place;
                int64_t i = 0;
                if (neox) {
                    for (; i + kStep<T> <= n; i += kStep<T>)
                        rotate_step(a + i, a + i + n, angles(i), angles(i + kStep<T> - kLanes), written_ + i,
                                    written_ + i + n);
                    for (; i < n; ++i)
                        rotate_pair(a[i], a[i + n], cos[i], sin[i], written_ + i, written_ + i + n);
                } else {
                    for (; i < n; ++i)
                        rotate_pair(a[2 * i], a[2 * i + 1], cos[i], sin[i], written_ + 2 * i, written_ + 2 * i + 1);
                }
                copy_short(a + rotated, written_ + rotated, size_t(rest) * sizeof(T));
                copy_span<kPast>(written_, to + place, size_t(launch_.head_dim) * sizeof(T));
            });
        }
    }

    // Dimensions are rows of tokens. The first `rotated` of them are rotated.
    void by_rows(const Cache& cache, int64_t layer, const Piece* first, const Piece* last, int64_t rotated) const {
        const Piece* next = first;
        for (; first < last; first = next) {
            next = std::min(first + kMostPieces, last);
            for (int64_t head = 0; head < launch_.num_heads; ++head) {
                const Rows rows = rows_of(cache, layer, first, next, head);
                int64_t row = 0;
                if (rotated) {
                    rotate_rows(rows, *first);
                    row = rotated;
                }
                copy_rows(rows, row);
            }
        }
    }

    // Where the rows of one head come from and go to.
    struct Rows {
        const Piece* pieces;
        int64_t num_pieces;
        const T* from[kMostPieces];
        T* to;
        int64_t stride;
        int64_t low, high;  // tokens of the target's block
        bool whole;         // all of its tokens, from one block
    };

    Rows rows_of(const Cache& cache, int64_t layer, const Piece* first, const Piece* last, int64_t head) const {
        Rows rows;
        rows.pieces = first;
        rows.num_pieces = last - first;
        for (int64_t p = 0; p < rows.num_pieces; ++p) rows.from[p] = source(cache, layer, first[p], head);
        rows.low = first->target_offset;
        rows.high = last[-1].target_offset + last[-1].count;
        rows.to = target(cache, layer, *first, head) - rows.low;
        rows.stride = cache.at.dim;
        rows.whole = rows.num_pieces == 1 && first->count == row_;
        return rows;
    }

    SPANFLOW_FN void gather(const Rows& rows, int64_t row, T* to) const {
        for (int64_t p = 0; p < rows.num_pieces; ++p)
            copy_short(rows.from[p] + row * rows.stride, to + rows.pieces[p].target_offset,
                       size_t(rows.pieces[p].count) * sizeof(T));
    }

    // `count` rows from `row` on, which stand in `from` one behind the other.
    SPANFLOW_FN void put(const Rows& rows, int64_t row, int64_t count, const T* from) const {
        const int64_t length = rows.high - rows.low;
        if (length == rows.stride && length == row_) {
            copy_span<kPast>(from, rows.to + row * rows.stride, size_t(count * length) * sizeof(T));
            return;
        }
        for (int64_t r = 0; r < count; ++r)
            copy_short(from + r * row_ + rows.low, rows.to + (row + r) * rows.stride + rows.low,
                       size_t(length) * sizeof(T));
    }

    void rotate_rows(const Rows& rows, const Piece& piece) const {
        const Pairs& pairs = launch_.pairs;
        const float *cos = cos_of(piece), *sin = sin_of(piece);
        // A pair's rows, from one to the next pair's: in the buffers neox keeps all low ones before all high ones.
        const int64_t length = row_;
        const int64_t apart = pairs.neox ? kPairs * row_ : row_, next = pairs.neox ? row_ : 2 * row_;
        for (int64_t i = 0; i < pairs.num_pairs; i += kPairs) {
            const int64_t count = std::min<int64_t>(kPairs, pairs.num_pairs - i);
            if (!rows.whole)
                for (int64_t k = 0; k < count; ++k) {
                    gather(rows, pairs.low(i + k), read_ + k * next);
                    gather(rows, pairs.high(i + k), read_ + k * next + apart);
                }
            for (int64_t k = 0; k < count; ++k) {
                const T *a = read_ + k * next, *b = a + apart;
                if (rows.whole) {
                    a = rows.from[0] + pairs.low(i + k) * rows.stride;
                    b = rows.from[0] + pairs.high(i + k) * rows.stride;
                }
                T *low = written_ + k * next, *high = low + apart;
                if (rows.whole)
                    for (int64_t t = 0; t < row_; t += kLine / int64_t(sizeof(T))) {
                        __builtin_prefetch(a + kPairs * next + t);
                        __builtin_prefetch(b + kPairs * next + t);
                    }
                const Angles by = {Floats{} + cos[i + k], Floats{} + sin[i + k]};
                for (int64_t t = 0; t < length; t += kStep<T>) rotate_step(a + t, b + t, by, by, low + t, high + t);
            }
            if (pairs.neox) {
                put(rows, pairs.low(i), count, written_);
                put(rows, pairs.high(i), count, written_ + apart);
            } else {
                put(rows, 2 * i, 2 * count, written_);
            }
        }
    }

    void copy_rows(const Rows& rows, int64_t begin) const {
        if (begin == launch_.head_dim) return;
        if (rows.whole && rows.stride == row_) {
            copy_span<kPast>(rows.from[0] + begin * row_, rows.to + begin * row_,
                             size_t((launch_.head_dim - begin) * row_) * sizeof(T));
            return;
        }
        for (int64_t row = begin; row < launch_.head_dim; row += 2 * kPairs) {
            const int64_t count = std::min<int64_t>(2 * kPairs, launch_.head_dim - row);
            for (int64_t r = 0; r < count; ++r) gather(rows, row + r, read_ + r * row_);
            put(rows, row, count, read_);
        }
    }

    void keys_anyhow(int64_t layer, const Piece* first, const Piece* last, int64_t rotated) const {
        const Pairs& pairs = launch_.pairs;
        const Strides& at = launch_.keys.at;
        if (rotated) {
            for (const Piece* piece = first; piece < last; ++piece)
                for (int64_t head = 0; head < launch_.num_heads; ++head) {
                    const T* from = source(launch_.keys, layer, *piece, head);
                    T* to = target(launch_.keys, layer, *piece, head);
                    for (int64_t i = 0; i < pairs.num_pairs; ++i) {
                        const int64_t low = pairs.low(i) * at.dim, high = pairs.high(i) * at.dim;
                        for (int64_t t = 0; t < piece->count * at.token; t += at.token)
                            rotate_pair(from[low + t], from[high + t], cos_of(*piece)[i], sin_of(*piece)[i],
                                        to + low + t, to + high + t);
                    }
                }
        }
        copy(launch_.keys, layer, first, last, rotated);
    }

    const Launch& launch_;
    const int64_t row_;  // of tokens, in whole vectors
    std::unique_ptr<char[]> buffer_;
    T* read_;
    T* written_;
    float* cos_;
    float* sin_;
};

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
