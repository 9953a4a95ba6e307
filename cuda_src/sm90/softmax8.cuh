// Scores of a warpgroup's 64 lines become weights of 8 bits (e4m3).
//
// The largest weight of a row should use the range of e4m3, and references should seldom move. So a reference stays until
// the weights of one thread, a quarter of a row's, sum to more than MOST, which is when they may outgrow e4m3. That sums
// tell it spares a search for the largest score; only where references do move are weights made again. Once a reference may
// also move down: if weights lie where e4m3 is coarse that are much alike and together not small, as beside a key that
// outshines all.
//
// Scores are sums of products of 8 bits; a row has a scale, and so have the 16 of each 64 keys that one thread of four holds
// (SageAttention2, Zhang et al. 2024, section 3.2).
#pragma once

#include "sm90/lines.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

constexpr float ABOVE = Config::LAGGING ? 6.f : 0.f;  // what scores may have above a reference, in units of log2, as they are
constexpr float LOG2_WEIGHT = 8.807354922f - ABOVE;   // of a score at the reference; of one ABOVE it: 448, the largest e4m3
constexpr float MOST = 450.f, LEAST = 0.25f;          // of a thread's sums: LEAST of 16 weights of 2^-6, the least normal e4m3
constexpr float LOWEST = -1e30f;  // a reference of rows that see nothing: finite, so that the difference of two is 0
constexpr float TINY = 1e-15f;    // for a scale of 0, which times a hidden score would be NaN

struct Rows {
    float top[2];     // reference, in units of log2
    float most[2];    // largest reference so far, unless LAGGING
    float least[2];   // what sums should not be below: one of a row's four threads watches
    float total[2];   // sum of weights
    float scale[2];   // what out is still to be multiplied by, where references moved
    float factor[2];  // of a score, to units of log2, but for the scale of the key

    __device__ __forceinline__ void reset(const float (&scales)[2], const Arguments& a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = most[half] = LOWEST, least[half] = total[half] = 0.f;
            factor[half] = (scales[half] == 0.f ? TINY : scales[half]) * a.factor;
        }
    }
    // Down by no more than 2^20, by which out and sums grow.
    __device__ __forceinline__ void move(int half, float to) {
        to = fmaxf(to, (Config::LAGGING ? top[half] : most[half]) - 20.f);
        if (top[half] == LOWEST)
            least[half] = Thread().lane() % 4 == 0 ? LEAST : 0.f;
        else if (to < top[half])
            least[half] = 0.f;
        scale[half] = exp2_approx(top[half] - to);
        total[half] *= scale[half];
        top[half] = to, most[half] = fmaxf(most[half], to);
    }
};

// In registers that no product is beside.
__device__ __forceinline__ void hide(Scores& scores, const Seen& seen) {
#pragma unroll
    for (int i = 0; i < Config::BN / 2; ++i)
        if (seen.hides(i)) scores[i] = minus_infinity();
}

// Weights, 2^(score - top + LOG2_WEIGHT), and sums of this thread's. Keys lie in V as weights come: of 16, those in columns
// 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t one after the other.
__device__ __forceinline__ void make_weights(Weights& weights, float (&sums)[2], const Scores& scores, const Rows& rows,
                                             float key_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float factor = rows.factor[half] * key_scale, offset = rows.top[half] - LOG2_WEIGHT;
        sums[half] = 0.f;
#pragma unroll
        for (int i = 0; i < Config::BN / 16; ++i) {
            float four[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                four[e] = exp2_approx(fmaf(scores[8 * i + 4 * (e / 2) + 2 * half + e % 2], factor, -offset));
            sums[half] += four[0] + four[1];
            sums[half] += four[2] + four[3];
            weights[2 * i + half] = pack(four[0], four[1], four[2], four[3], Config::VElement());
        }
    }
}

// The same in 16 bits, in the order of columns.
__device__ __forceinline__ void make_weights(Weights16& weights, float (&sums)[2], const Scores& scores, const Rows& rows,
                                             float key_scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float factor = rows.factor[half] * key_scale, offset = rows.top[half] - LOG2_WEIGHT;
        sums[half] = 0.f;
#pragma unroll
        for (int i = half; i < Config::BN / 4; i += 2) {
            const float x = exp2_approx(fmaf(scores[2 * i], factor, -offset));
            const float y = exp2_approx(fmaf(scores[2 * i + 1], factor, -offset));
            sums[half] += x + y;
            weights[i] = pack(x, y, Float16());
        }
    }
}

// Whether a reference of the warp may have to move.
__device__ __forceinline__ bool may_move(const float (&sums)[2], const Rows& rows) {
    return __any_sync(~0u, sums[0] > MOST | sums[1] > MOST | sums[0] < rows.least[0] | sums[1] < rows.least[1]);
}

// Of the four threads of a row.
__device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Which references have to, if any.
__device__ __forceinline__ bool find_moves(bool (&moves)[2], Rows& rows, const float (&sums)[2], const Arguments& a) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = largest_of_row(sums[half]);
        const bool alike = sum < -4.f * largest_of_row(-sums[half]);
        const bool low = __shfl_sync(~0u, sums[half] < rows.least[half], Thread().lane() & 28);
        // If all keys weighed as these do, would they be an eighth of the sum?
        const float share = sum_of_row(sums[half]) * (float(a.kv_len) * (8.f / Config::BN));
        const bool down = low & sum < LEAST & alike & share > sum_of_row(rows.total[half]);
        moves[half] = sum > MOST | down;
        if (sums[half] < rows.least[half] && !down) rows.least[half] = sums[half] / 16;  // watched in vain: for less
    }
    return __any_sync(~0u, moves[0] | moves[1]);
}

// Moves references to the largest scores of their rows, whose weights are then exact.
__device__ __forceinline__ void move_references(const bool (&moves)[2], Rows& rows, const Scores& scores, float key_scale) {
    float largest[2];
    bool below = false;  // of floats that are not all below 0 the largest has the largest bits
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int most = __float_as_int(scores[2 * half]);
#pragma unroll
        for (int i = 2 * half; i < Config::BN / 2; i += 4)
            most = __vimax3_s32(most, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
        below |= most < 0;
        largest[half] = __int_as_float(most);
    }
    if (__builtin_expect(__any_sync(~0u, below), 0)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = minus_infinity();
#pragma unroll
            for (int i = 2 * half; i < Config::BN / 2; i += 4)
                largest[half] = fmaxf(fmaxf(largest[half], scores[i]), scores[i + 1]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        largest[half] = largest_of_row(fmaxf(largest[half] * (rows.factor[half] * key_scale), LOWEST));
        rows.scale[half] = 1.f;
        if (moves[half] & largest[half] > LOWEST) rows.move(half, largest[half]);  // LOWEST: of a row that sees none
    }
}

// Whether references moved, so that out has to be scaled. There are none before the first tile.
template <typename W>
__device__ __forceinline__ bool weigh(W& weights, const Scores& scores, Rows& rows, float key_scale, bool first,
                                      const Arguments& a) {
    float sums[2];
    bool moves[2] = {true, true}, moved = !Config::LAGGING || first;
    if (moved) move_references(moves, rows, scores, key_scale);
#pragma unroll 1
    while (true) {
        make_weights(weights, sums, scores, rows, key_scale);
        if (moved || __builtin_expect(!may_move(sums, rows), 1) || !find_moves(moves, rows, sums, a)) break;
        move_references(moves, rows, scores, key_scale);
        moved = true;
    }
    rows.total[0] += sums[0], rows.total[1] += sums[1];
    return moved;
}

// Natural logarithm of a row's sum of exponentials, without what lse_shifts adds.
__device__ __forceinline__ float lse_of(const Rows& rows, int half, float total, const Arguments&) {
    return 0.693147181f * (rows.top[half] - LOG2_WEIGHT + __log2f(total));
}

__device__ __forceinline__ void scale_out(Out& out, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < Config::DV / 2; ++i) out[i] *= rows.scale[i / 2 % 2];
}

}  // namespace cuflash
#endif
