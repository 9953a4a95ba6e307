// What happens to scores between products, with keys as rows: S^T to weights P^T, and dP^T to dS^T.
#pragma once

#include "common/tanh.cuh"
#include "sm80/backward_config.cuh"

namespace cuflash {

// Of a warp: KEYS keys as rows, QUERIES queries as columns.
typedef Sums<Config::KEYS / 16, Config::QUERIES / 16> Scores;

// What has to happen to raw scores before all else, beside the plain factor that exp2 folds in.
template <class AnyScores>
__device__ __forceinline__ void prepare_scores(AnyScores& scores, float premultiply) {
#pragma unroll
    for (int r = 0; r < AnyScores::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < AnyScores::COLUMN_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float score = scores.of[r][n][e] * premultiply;
                scores.of[r][n][e] = Config::SOFTCAP ? tanh_exact(score) : score;
            }
}

// Which keys, from the first to the last, a query sees; none if it does not exist.
struct Visible {
    int diagonal, left, right, q_len, kv_len;
    __device__ __forceinline__ int first(int query) const { return Config::BOUNDED ? query + diagonal - left : 0; }
    __device__ __forceinline__ int last(int query) const {
        const int last = Config::BOUNDED ? min(query + diagonal + right, kv_len - 1) : kv_len - 1;
        return query < q_len ? last : -1;
    }
};

// Selects, so that what a hidden pair holds does not matter.
__device__ __forceinline__ void hide_pairs(Scores& scores, int first_key, int first_query, const Visible& visible) {
    const int lane = threadIdx.x % 32, lane_key = first_key + lane / 4;
#pragma unroll
    for (int n = 0; n < Scores::COLUMN_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int query = first_query + 8 * n + 2 * (lane % 4) + e;
            const int low = visible.first(query) - lane_key, high = visible.last(query) - lane_key;
#pragma unroll
            for (int r = 0; r < Scores::ROW_TILES; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (16 * r + 8 * half < low || 16 * r + 8 * half > high)
                        scores.of[r][n][2 * half + e] = minus_infinity();
        }
}

// A weight, and what becomes of its score: what its part of dS has to be multiplied by. HIDDEN: some score is -inf, and then
// weighs 0 whatever else its row holds.
template <bool HIDDEN>
__device__ __forceinline__ float weigh(float& score, float factor, float lse) {
    const float plain = exp2_approx(fmaf(score, factor, -lse));
    const bool hidden = HIDDEN && score == minus_infinity();
    const float weight = hidden ? 0.f : plain;
    score = !Config::SOFTCAP ? weight : hidden ? 0.f : weight * fmaf(-score, score, 1.f);
    return weight;
}

// What a weight's part of dS is.
template <bool HIDDEN>
__device__ __forceinline__ float differentiate(float weight, float by_weight, float delta) {
    const float by_score = weight * fmaf(by_weight, SHIFT_BACK, -delta);
    return HIDDEN && weight == 0.f ? 0.f : by_score;
}

// Where a warp keeps its part of P^T or dS^T: a tile of BN keys as rows, M queries as columns.
struct Kept {
    u32 at;  // of the lane's first pair
    __device__ __forceinline__ Kept(u32 tile, int first_key, int first_query) {
        const int lane = threadIdx.x % 32;
        at = tile + first_query / 64 * Config::BN * 128 + 128 * first_key +
             (unit_offset(lane / 4, first_query % 64 / 8) + 4 * (lane % 4));
    }
    __device__ __forceinline__ void put(int r, int n, int half, float first, float second) const {
        store_pair((at ^ 16 * (n % 8)) + n / 8 * Config::BN * 128 + 2048 * r + 1024 * half,
                   pack(first, second, Config::Element()));
    }
};

// The lane's two rows of 8 from there on: LSE and delta of both.
__device__ __forceinline__ void load_rows(Row (&to)[2], u32 rows, int n) {
    u32 words[4];
    load_unit(words, rows + 8 * (8 * n + 2 * (threadIdx.x % 4)));
    to[0] = {__uint_as_float(words[0]), __uint_as_float(words[1])};
    to[1] = {__uint_as_float(words[2]), __uint_as_float(words[3])};
}

template <bool HIDDEN>
__device__ __forceinline__ void weigh_scores(Scores& scores, u32 rows, float factor, const Kept& kept) {
#pragma unroll
    for (int n = 0; n < Scores::COLUMN_TILES; ++n) {
        Row of[2];
        load_rows(of, rows, n);
#pragma unroll
        for (int r = 0; r < Scores::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float(&pair)[4] = scores.of[r][n];
                const float first = weigh<HIDDEN>(pair[2 * half], factor, of[0].lse);
                const float second = weigh<HIDDEN>(pair[2 * half + 1], factor, of[1].lse);
                kept.put(r, n, half, first, second);
            }
    }
}

template <bool HIDDEN>
__device__ __forceinline__ void differentiate_scores(const Scores& weights, const Scores& by_weight, u32 rows,
                                                     const Kept& kept) {
#pragma unroll
    for (int n = 0; n < Scores::COLUMN_TILES; ++n) {
        Row of[2];
        load_rows(of, rows, n);
#pragma unroll
        for (int r = 0; r < Scores::ROW_TILES; ++r)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const float(&w)[4] = weights.of[r][n];
                const float(&by)[4] = by_weight.of[r][n];
                kept.put(r, n, e / 2, differentiate<HIDDEN>(w[e], by[e], of[0].delta),
                         differentiate<HIDDEN>(w[e + 1], by[e + 1], of[1].delta));
            }
    }
}

}  // namespace cuflash
