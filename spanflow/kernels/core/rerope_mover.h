// Moves the chunks of a launch on a CPU, one after another.
//
// Keys are rotated in buffers that stay in the first cache, and leave from there in whole lines.
#pragma once

#include "rerope_lanes.h"

#include <algorithm>
#include <memory>

namespace spanflow {

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

    // From a piece's part of one head to what is read after it, in bytes: that of the next head, and from the last one
    // that of the next chunk. Prefetched from there, it arrives while this one is rotated.
    struct Ahead {
        int64_t to_next_head, from_last_head, last_head;

        SPANFLOW_FN int64_t of(int64_t head) const { return head < last_head ? to_next_head : from_last_head; }
    };

    Ahead ahead(const Cache& cache, int64_t layer, const Piece* piece, const Piece* next) const {
        if (next >= launch_.pieces + launch_.num_pieces) next = piece;
        const int64_t to_next_piece = int64_t(reinterpret_cast<uintptr_t>(source(cache, layer, *next, 0)) -
                                              reinterpret_cast<uintptr_t>(source(cache, layer, *piece, 0)));
        // Where all heads of a token come before the next token, they come before the next piece too.
        if (cache.at.head < cache.at.token && cache.at.dim == 1) return {0, to_next_piece, 0};
        const int64_t last = launch_.num_heads - 1, head = cache.at.head * int64_t(sizeof(T));
        return {head, to_next_piece - last * head, last};
    }

    // Dimensions from `begin` on, as they are.
    void copy(const Cache& cache, int64_t layer, const Piece* first, const Piece* last, int64_t begin) const {
        const Strides& at = cache.at;
        const int64_t dims = launch_.head_dim - begin;
        if (!dims) return;
        if (at.dim == 1) {
            for (const Piece* piece = first; piece < last; ++piece)
                copy_token_major(cache, layer, piece, piece + (last - first), begin);
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

    void copy_token_major(const Cache& cache, int64_t layer, const Piece* piece, const Piece* next,
                          int64_t begin) const {
        const Strides& at = cache.at;
        const int64_t dims = launch_.head_dim - begin, count = piece->count, heads = launch_.num_heads;
        const T* from = source(cache, layer, *piece, 0) + begin;
        T* to = target(cache, layer, *piece, 0) + begin;
        const Ahead further = ahead(cache, layer, piece, next);
        if (at.head == dims && at.token == heads * dims) {
            copy_span<kPast>(from, to, size_t(count * heads * dims) * sizeof(T), further.of(0));
        } else if (at.token == dims) {
            for (int64_t h = 0; h < heads; ++h)
                copy_span<kPast>(from + h * at.head, to + h * at.head, size_t(count * dims) * sizeof(T),
                                 further.of(h));
        } else {
            each_token(at, count, [&](int64_t place, int64_t head) {
                copy_span<kPast>(from + place, to + place, size_t(dims) * sizeof(T), further.of(head));
            });
        }
    }

    // All heads of some tokens, in the order in which they lie.
    template <class Do>
    SPANFLOW_FN void each_token(const Strides& at, int64_t count, Do&& run) const {
        const int64_t heads = launch_.num_heads;
        if (at.head < at.token) {
            for (int64_t t = 0; t < count; ++t)
                for (int64_t h = 0; h < heads; ++h) run(t * at.token + h * at.head, h);
        } else {
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t t = 0; t < count; ++t) run(t * at.token + h * at.head, h);
        }
    }

    void keys_token_major(int64_t layer, const Piece* first, const Piece* last, int64_t rotated) const {
        if (!rotated) {
            copy(launch_.keys, layer, first, last, 0);
            return;
        }
        const Strides& at = launch_.keys.at;
        const int64_t n = launch_.pairs.num_pairs, dims = launch_.head_dim;
        const size_t vector = sizeof(typename Step<T>::Vector);
        for (const Piece* piece = first; piece < last; ++piece) {
            const T* from = source(launch_.keys, layer, *piece, 0);
            T* to = target(launch_.keys, layer, *piece, 0);
            const float *cos = cos_of(*piece), *sin = sin_of(*piece);
            in_steps<T>(cos, n, cos_);
            in_steps<T>(sin, n, sin_);
            const Ahead further = ahead(launch_.keys, layer, piece, piece + (last - first));
            const size_t places = reinterpret_cast<uintptr_t>(to) | size_t(at.token | at.head) * sizeof(T);
            const bool in_vectors = launch_.pairs.neox && n % kStep<T> == 0 && (!kPast || places % vector == 0);
            each_token(at, piece->count, [&](int64_t place, int64_t head) {
                const T* a = from + place;
                fetch_ahead(a, further.of(head), size_t(dims) * sizeof(T));
                if (in_vectors) {
                    rotate_token<kPast>(a, to + place, n);
                    copy_span<kPast>(a + rotated, to + place + rotated, size_t(dims - rotated) * sizeof(T), 0);
                    return;
                }
                if (launch_.pairs.neox) {
                    const int64_t whole = n / kStep<T> * kStep<T>;
                    rotate_token<false>(a, written_, whole);
                    for (int64_t i = whole; i < n; ++i)
                        rotate_pair(a[i], a[i + n], cos[i], sin[i], written_ + i, written_ + i + n);
                } else {
                    for (int64_t i = 0; i < n; ++i)
                        rotate_pair(a[2 * i], a[2 * i + 1], cos[i], sin[i], written_ + 2 * i, written_ + 2 * i + 1);
                }
                copy_short(a + rotated, written_ + rotated, size_t(dims - rotated) * sizeof(T));
                copy_span<kPast>(written_, to + place, size_t(dims) * sizeof(T), 0);
            });
        }
    }

    // The first `count` pairs of a token, as neox has them.
    template <bool kPastCaches>
    SPANFLOW_FN void rotate_token(const T* from, T* to, int64_t count) const {
        const int64_t n = launch_.pairs.num_pairs;
        for (int64_t i = 0; i < count; i += kStep<T>)
            put_turned<kPastCaches>(rotate_step(from + i, from + i + n, angles(i), angles(i + kStep<T> - kLanes)),
                                    to + i, to + i + n);
    }

    // Dimensions are rows of tokens. The first `rotated` of them are rotated.
    void by_rows(const Cache& cache, int64_t layer, const Piece* first, const Piece* last, int64_t rotated) const {
        const Piece* next = first;
        for (; first < last; first = next) {
            next = std::min(first + kMostPieces, last);
            Ahead further[kMostPieces];
            for (const Piece* piece = first; piece < next; ++piece)
                further[piece - first] = ahead(cache, layer, piece, piece + (next - first));
            for (int64_t head = 0; head < launch_.num_heads; ++head) {
                Rows rows = rows_of(cache, layer, first, next, head);
                for (int64_t p = 0; p < rows.num_pieces; ++p) rows.ahead[p] = further[p].of(head);
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
        int64_t ahead[kMostPieces];
        T* to;
        int64_t stride;
        int64_t low, high;  // tokens of the target's block
        bool whole;         // all of its tokens, from one block
        bool aligned;       // each of its rows begins where a vector may
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
        const size_t vector = sizeof(typename Step<T>::Vector);
        rows.aligned = (reinterpret_cast<uintptr_t>(rows.to) | size_t(rows.stride) * sizeof(T)) % vector == 0;
        return rows;
    }

    SPANFLOW_FN void gather(const Rows& rows, int64_t row, T* to) const {
        for (int64_t p = 0; p < rows.num_pieces; ++p) {
            const T* from = rows.from[p] + row * rows.stride;
            const size_t bytes = size_t(rows.pieces[p].count) * sizeof(T);
            fetch_ahead(from, rows.ahead[p], bytes);
            copy_short(from, to + rows.pieces[p].target_offset, bytes);
        }
    }

    // `count` rows from `row` on, which stand in `from` one behind the other.
    SPANFLOW_FN void put(const Rows& rows, int64_t row, int64_t count, const T* from) const {
        const int64_t length = rows.high - rows.low;
        if (length == rows.stride && length == row_) {
            copy_span<kPast>(from, rows.to + row * rows.stride, size_t(count * length) * sizeof(T), 0);
            return;
        }
        for (int64_t r = 0; r < count; ++r)
            copy_short(from + r * row_ + rows.low, rows.to + (row + r) * rows.stride + rows.low,
                       size_t(length) * sizeof(T));
    }

    void rotate_rows(const Rows& rows, const Piece& piece) const {
        const Pairs& pairs = launch_.pairs;
        const float *cos = cos_of(piece), *sin = sin_of(piece);
        // In the buffers as in the block neox keeps all low rows before all high ones.
        const int64_t next = pairs.neox ? 1 : 2, apart = pairs.neox ? kPairs : 1;
        const bool all = rows.high - rows.low == row_ && (!kPast || rows.aligned);
        for (int64_t i = 0; i < pairs.num_pairs; i += kPairs) {
            const int64_t count = std::min<int64_t>(kPairs, pairs.num_pairs - i);
            // From and to where: pairs, and the rows of one, are so far apart.
            Way from = {rows.from[0] + pairs.low(i) * rows.stride, next * rows.stride,
                        (pairs.high(i) - pairs.low(i)) * rows.stride};
            Way to = {rows.to + pairs.low(i) * rows.stride, from.next, from.apart};
            const int64_t fetched = rows.whole ? rows.ahead[0] : 0;
            if (!rows.whole) {
                for (int64_t k = 0; k < count; ++k) {
                    gather(rows, pairs.low(i + k), read_ + k * next * row_);
                    gather(rows, pairs.high(i + k), read_ + (k * next + apart) * row_);
                }
                from = {read_, next * row_, apart * row_};
            }
            if (all) {
                rotate_pairs<kPast>(from, to, count, cos + i, sin + i, fetched);
                continue;
            }
            to = {written_, next * row_, apart * row_};
            rotate_pairs<false>(from, to, count, cos + i, sin + i, fetched);
            put(rows, pairs.low(i), pairs.neox ? count : 2 * count, written_);
            if (pairs.neox) put(rows, pairs.high(i), count, written_ + kPairs * row_);
        }
    }

    struct Way {
        const T* begin;
        int64_t next, apart;
    };

    template <bool kPastCaches>
    SPANFLOW_FN void rotate_pairs(const Way& from, const Way& to, int64_t count, const float* cos,
                                  const float* sin, int64_t ahead) const {
        const int64_t length = row_;
        for (int64_t k = 0; k < count; ++k) {
            const T *a = from.begin + k * from.next, *b = a + from.apart;
            T *low = const_cast<T*>(to.begin) + k * to.next, *high = low + to.apart;
            const Angles by = {Floats{} + cos[k], Floats{} + sin[k]};
            for (int64_t t = 0; t < length; t += kStep<T>) {
                fetch_ahead(a + t, ahead, sizeof(typename Step<T>::Vector));
                fetch_ahead(b + t, ahead, sizeof(typename Step<T>::Vector));
                put_turned<kPastCaches>(rotate_step(a + t, b + t, by, by), low + t, high + t);
            }
        }
    }

    template <bool kPastCaches, class V>
    static SPANFLOW_FN void put_turned(const Turned<V>& value, T* low, T* high) {
        put_vector<kPastCaches>(value.low, low);
        put_vector<kPastCaches>(value.high, high);
    }

    void copy_rows(const Rows& rows, int64_t begin) const {
        if (begin == launch_.head_dim) return;
        if (rows.whole && rows.stride == row_) {
            copy_span<kPast>(rows.from[0] + begin * row_, rows.to + begin * row_,
                             size_t((launch_.head_dim - begin) * row_) * sizeof(T), rows.ahead[0]);
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

}  // namespace spanflow
