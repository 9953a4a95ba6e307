// Scores of a warpgroup become weights, and gradients of weights become those of scores. A thread holds two of the 64 lines,
// keys 8 apart; of column tile t (8 queries) elements 4 t and 4 t + 1 of the first, 4 t + 2 and 4 t + 3 of the second, in
// columns 8 t + 2 (lane % 4) and the next.
#pragma once

#include "common/tanh.cuh"
#include "sm90_backward/products.cuh"

namespace cuflash {

typedef float RowStats[Config::BM / 4];  // of the queries in a thread's columns

template <int FROM = 0, int TO = Config::BM / 4>
// `at`: those of the thread's first columns.
__device__ __forceinline__ void load_row_stats(RowStats& stats, u32 at) {
#pragma unroll
    for (int i = FROM; i < TO; i += 4) load_floats(stats[i], stats[i + 1], stats[i + 2], stats[i + 3], at + 16 * i);
}
__device__ __forceinline__ constexpr int column_of(int element) { return element / 4 * 2 + element % 2; }

// Which queries see a thread's two keys: less the columns of the lane.
struct Sight {
    int low[2], high[2];

    Sight() = default;
    __device__ __forceinline__ Sight(const Work& work, int first_line, const Arguments& a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int key = work.tile * Config::BN + first_line + 8 * half, centre = key - work.diagonal - 2 * (threadIdx.x % 4);
            low[half] = key >= work.kv_len ? 1 << 30 : Config::BOUNDED ? centre - a.right : -(1 << 30);
            high[half] = centre + a.left;
        }
    }
};

// Of the queries of a tile.
struct Seen {
    int low[2], high[2];

    __device__ __forceinline__ Seen(const Sight& sight, int tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            low[half] = sight.low[half] - tile * Config::BM, high[half] = sight.high[half] - tile * Config::BM;
    }
    __device__ __forceinline__ bool hides(int element) const {
        const int half = element / 2 % 2, column = element / 4 * 8 + element % 2;
        return column < low[half] || (Config::LEFT && column > high[half]);
    }
};

// weight = 2^(score * factor - LSE). What tanh makes of scores that are capped takes their place, for its slope.
template <bool HIDDEN>
__device__ __forceinline__ float weight_of(float& score, int element, const RowStats& lse, const Seen& seen, const Arguments& a) {
    if (Config::CAPPED) score = tanh_exact(score * a.premultiply);
    float power = score * a.factor - lse[column_of(element)];
    if (HIDDEN && seen.hides(element)) power = minus_infinity();
    return exp2_approx(power);
}

// Scores FROM to TO become weights; those of scores that are capped, which go with their gradients, have the slope in them.
template <bool HIDDEN, int FROM, int TO>
__device__ __forceinline__ void weigh(Scores& scores, const RowStats& lse, const Seen& seen, const Arguments& a) {
#pragma unroll
    for (int i = FROM; i < TO; ++i) scores[i] = weight_of<HIDDEN>(scores[i], i, lse, seen, a);
}

template <bool HIDDEN>
__device__ __forceinline__ void weigh_capped(Weights& weights, Scores& scores, const RowStats& lse, const Seen& seen,
                                             const Arguments& a) {
#pragma unroll
    for (int i = 0; i < Config::BM / 2; i += 2) {
        const float first = weight_of<HIDDEN>(scores[i], i, lse, seen, a);
        const float second = weight_of<HIDDEN>(scores[i + 1], i + 1, lse, seen, a);
        weights[i / 2] = pack(first, second, Config::Element());
        scores[i] = first * fmaf(-scores[i], scores[i], 1.f);
        scores[i + 1] = second * fmaf(-scores[i + 1], scores[i + 1], 1.f);
    }
}

// Gradients FROM to TO of weights become those of scores, less the scale.
template <int FROM, int TO>
__device__ __forceinline__ void differentiate(Scores& gradients, const Scores& weights, const RowStats& delta) {
#pragma unroll
    for (int i = FROM; i < TO; ++i) gradients[i] = weights[i] * (gradients[i] - delta[column_of(i)]);
}

__device__ __forceinline__ void pack_scores(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::BM / 4; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1], Config::Element());
}

}  // namespace cuflash
