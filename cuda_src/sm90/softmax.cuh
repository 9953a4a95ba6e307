// Scores of a warpgroup's 64 lines become weights of 16 bits.
#pragma once

#include "common/tanh.cuh"
#include "sm90/lines.cuh"

#if CONFIG_BITS == 16
namespace cuflash {


struct Rows {
    float top[2], total[2];  // reference, sum of weights
    float scale[2];          // what out is still to be multiplied by
    bool huge;               // whether a reference of the warp is

    __device__ __forceinline__ void reset(const float (&)[2], const Arguments& a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) top[half] = a.unseen, total[half] = 0.f, scale[half] = 1.f;
        huge = false;
    }
};

__device__ __forceinline__ void prepare_scores(Scores& scores, float premultiply) {
    if (!Config::SCORES) return;
#pragma unroll
    for (int i = 0; i < Config::BN / 2; ++i) {
        const float score = scores[i] * premultiply;
        scores[i] = Config::SCORES == 2 ? tanh_exact(score) : score;
    }
}

// Selects, so that what a hidden key holds does not matter.
__device__ __forceinline__ void hide(Scores& scores, const Seen& seen) {
#pragma unroll
    for (int i = 0; i < Config::BN / 2; ++i)
        if (seen.hides(i)) scores[i] = minus_infinity();
}

// Whether a row may have outgrown its reference by 2^STALE. The greatest of floats that are not all negative is the greatest
// of their bits as integers too, of which one instruction compares three. A row whose reference is far below 0 counts too.
__device__ __forceinline__ bool outgrown(const Scores& scores, const Rows& rows, const Arguments& a) {
    bool found = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int most = __float_as_int(scores[2 * half]);
#pragma unroll
        for (int i = 2 * half; i < Config::BN / 2; i += 4)
            most = __vimax3_s32(most, __float_as_int(scores[i]), __float_as_int(scores[i + 1]));
        found |= !((__int_as_float(most) - rows.top[half]) * a.factor <= Config::STALE);
        found |= rows.top[half] * a.factor < -Config::STALE;
    }
    return found;
}

// References move to the largest scores of rows that have outgrown them, which few do after the first tiles.
__device__ __forceinline__ void move_references(const Scores& scores, Rows& rows, const Arguments& a) {
    float top[2];
    bool huge = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = rows.top[half];
#pragma unroll
        for (int i = 2 * half; i < Config::BN / 2; i += 4)
            top[half] = fmaxf(fmaxf(top[half], scores[i]), scores[i + 1]);
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
        if ((top[half] - rows.top[half]) * a.factor <= Config::STALE) top[half] = rows.top[half];
        // Beyond 2^24 the product is off by more than 1: the difference has to come first.
        huge |= (fabsf(top[half] * a.factor) > 16777216.f) & (top[half] != a.unseen);
    }
    const bool was_huge = rows.huge;
    rows.huge = __any_sync(~0u, huge);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        // As the weights before and after are taken: from products, which are rounded alike, or from differences.
        const float product = __fmul_rn(rows.top[half], a.factor);
        float exponent =
            rows.huge ? (rows.top[half] - top[half]) * a.factor : product - __fmul_rn(top[half], a.factor);
        if (rows.huge != was_huge) {  // bounded, so that what nothing has been added to stays 0
            const float rounded_off = fmaf(rows.top[half], a.factor, -product);
            exponent += fminf(fmaxf(rows.huge ? -rounded_off : rounded_off, -100.f), 100.f);
        }
        rows.scale[half] = exp2_approx(exponent);
        rows.total[half] *= rows.scale[half];
        rows.top[half] = top[half];
    }
}

// Scores become weights, 2^(score * factor - top * factor). Before the FIRST tile there are no references.
template <bool FIRST = false>
__device__ __forceinline__ void weigh(Scores& scores, Rows& rows, const Arguments& a) {
    rows.scale[0] = rows.scale[1] = 1.f;
    if (FIRST || __any_sync(~0u, outgrown(scores, rows, a))) move_references(scores, rows, a);
    if (rows.huge) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 2 * half; i < Config::BN / 2; i += 4)
                scores[i] -= rows.top[half], scores[i + 1] -= rows.top[half];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float offset = rows.huge ? 0.f : __fmul_rn(rows.top[half], a.factor);  // rounded as when it moved
#pragma unroll
        for (int i = 2 * half; i < Config::BN / 2; i += 4) {
            scores[i] = exp2_approx(scores[i] * a.factor - offset);
            scores[i + 1] = exp2_approx(scores[i + 1] * a.factor - offset);
            rows.total[half] += scores[i] + scores[i + 1];
        }
    }
}

__device__ __forceinline__ void pack_weights(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::BN / 4; ++i)
        weights[i] = pack(scores[2 * i], scores[2 * i + 1], Config::VElement());
}

// Natural logarithm of a row's sum of exponentials.
__device__ __forceinline__ float lse_of(const Rows& rows, int half, float total, const Arguments& a) {
    return 0.693147181f * (__fmul_rn(rows.top[half], a.factor) + __log2f(total));
}

__device__ __forceinline__ void scale_out(Out& out, const Rows& rows) {
    if (!__any_sync(~0u, rows.scale[0] != 1.f || rows.scale[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < Config::DV / 2; ++i) out[i] *= rows.scale[i / 2 % 2];
}

}  // namespace cuflash
#endif
