// Scores of a warpgroup's 64 lines become weights of 8 bits (e4m3).
//
// The largest weight of a row should use the range of e4m3, and references should seldom move. So a reference stays while the
// largest score of each 64 keys is at most 2^ABOVE above it and 2^BELOW below it. What is summed moves with it, and so it goes
// no more than 2^20 below the largest so far. That all is well is found from the weights themselves, beside their making: else
// they are made again.
//
// Scores are sums of products of 8 bits; a row has a scale, and so have the 16 of each 64 keys that one thread of four holds
// (SageAttention2, Zhang et al. 2024, section 3.2).
#pragma once

#include "sm90/lines.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

constexpr float ABOVE = Config::LAGGING ? 4.f : 0.f, BELOW = ABOVE;            // in units of log2, as scores are
constexpr int MOST = 0x43e00000;                     // bits of 448, the largest e4m3; a score at the reference has 448 / 2^ABOVE
constexpr int LEAST = MOST - (int(ABOVE + BELOW) << 23);
constexpr float LOG2_WEIGHT = 8.807354922f - ABOVE;  // of a score at the reference
constexpr float LOWEST = -1e30f;  // a reference of rows that see nothing: finite, so that the difference of two is 0
constexpr float TINY = 1e-15f;    // for a scale of 0, which times a hidden score would be NaN
constexpr bool WHOLE = Score(0.5f) == 0;  // integers

// Integers start at the bits of 1.5 * 2^23: read as floats they are that and the sum, which is below 2^22, exactly.
constexpr bool ADD_TO_START = WHOLE;
constexpr float START = WHOLE ? 12582912.f : 0.f;
__device__ __forceinline__ int& as_int(Score& score) { return reinterpret_cast<int&>(score); }
__device__ __forceinline__ void start_scores(Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::COLUMNS / 2 && WHOLE; ++i) asm volatile("mov.b32 %0, 0x4b400000;" : "=r"(as_int(scores[i])));
}
__device__ __forceinline__ float as_float(float score) { return score; }
__device__ __forceinline__ float as_float(int score) { return __int_as_float(score); }

typedef float KeyFactors[Config::COLUMNS / 64];  // scales of the keys that a thread has scores of

struct Rows {
    float top[2], most[2];  // reference, the largest so far, in units of log2
    float total[2];         // sum of weights
    float scale[2];         // what out is still to be multiplied by
    float factor[2];        // of a score, to units of log2, but for the scale of the key

    __device__ __forceinline__ void reset(const float (&scales)[2], const Arguments& a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = most[half] = LOWEST, total[half] = 0.f, scale[half] = 1.f;
            factor[half] = (scales[half] == 0.f ? TINY : scales[half]) * a.factor;
        }
    }
    // Bits of what the largest weight of 64 keys should not be below: of 0 where the reference is as low as it goes.
    __device__ __forceinline__ int least(int half) const { return top[half] > most[half] - 20.f ? LEAST : 0; }
};

// In registers that no product is beside.
__device__ __forceinline__ void hide(Scores& scores, const Seen& seen) {
#pragma unroll
    for (int i = 0; i < Config::COLUMNS / 2; ++i)
        if (seen.hides(i)) as_int(scores[i]) = 0xff800000;  // minus infinity
}

// A score times a factor, less an offset. Hidden ones are not touched in their registers, beside which products go on.
template <bool HIDDEN>
__device__ __forceinline__ float exponent(const Scores& scores, int i, float factor, float offset, const Seen& seen) {
    const float x = fmaf(as_float(scores[i]), factor, -offset);
    return HIDDEN && seen.hides(i) ? minus_infinity() : x;
}

// Weights, 2^(score - top + LOG2_WEIGHT), their sums, and the bits of the largest of this thread's. Keys lie in V as weights
// come: of 16, those in columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t one after the other.
template <bool HIDDEN>
__device__ __forceinline__ void make_weights(Weights& weights, float (&sums)[2], int (&most)[2], const Scores& scores, const Rows& rows,
                                             const KeyFactors& keys, const Seen& seen) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float offset = rows.top[half] - LOG2_WEIGHT;
        sums[half] = 0.f, most[half] = 0;
#pragma unroll
        for (int i = 0; i < Config::COLUMNS / 16; ++i) {
            const float factor = rows.factor[half] * keys[i / 4];
            const float from_start = WHOLE ? fmaf(START, factor, offset) : offset;
            float four[4];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                four[e] = exp2_approx(exponent<HIDDEN>(scores, 8 * i + 4 * (e / 2) + 2 * half + e % 2, factor, from_start, seen));
            sums[half] += four[0] + four[1];
            sums[half] += four[2] + four[3];
            most[half] = __vimax3_s32(most[half], __float_as_int(four[0]), __float_as_int(four[1]));
            most[half] = __vimax3_s32(most[half], __float_as_int(four[2]), __float_as_int(four[3]));
            weights[2 * i + half] = pack(four[0], four[1], four[2], four[3], Config::VElement());
        }
    }
}

// Whether a reference of the warp has to move: up for one of a row's four threads, or down for all of them.
__device__ __forceinline__ bool has_to_move(const int (&most)[2], const Rows& rows) {
    const bool above = most[0] > MOST | most[1] > MOST;
    u32 fine = __ballot_sync(~0u, most[0] >= rows.least(0)), others = __ballot_sync(~0u, most[1] >= rows.least(1));
    fine |= fine >> 1, others |= others >> 1;
    fine |= fine >> 2, others |= others >> 2;
    return __any_sync(~0u, above) | ((fine & others & 0x11111111) != 0x11111111);
}

__device__ __forceinline__ int largest_of_row(int x) {
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

template <bool HIDDEN>
__device__ __forceinline__ void move_references(Rows& rows, const int (&most)[2], const Scores& scores,
                                                const KeyFactors& keys, const Seen& seen) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float largest = LOWEST;
#pragma unroll
        for (int i = 2 * half; i < Config::COLUMNS / 2; i += 4) {
            const float factor = rows.factor[half] * keys[i / 32];
            largest = fmaxf(fmaxf(largest, exponent<HIDDEN>(scores, i, factor, START * factor, seen)),
                            exponent<HIDDEN>(scores, i + 1, factor, START * factor, seen));
        }
        largest = largest_of_row(largest);
        const int weight = largest_of_row(most[half]);
        if (largest > LOWEST & (weight > MOST | weight < rows.least(half))) {
            const float top = fmaxf(largest, rows.most[half] - 20.f);
            rows.scale[half] = exp2_approx(rows.top[half] - top);
            rows.total[half] *= rows.scale[half];
            rows.top[half] = top, rows.most[half] = fmaxf(rows.most[half], top);
        }
    }
}

// A reference of their own: the largest score, whose weight is then exact.
template <bool HIDDEN>
__device__ __forceinline__ void choose_references(Rows& rows, const Scores& scores, const KeyFactors& keys, const Seen& seen) {
    float top[2];
    bool below = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = LOWEST;
#pragma unroll
        for (int block = 0; block < Config::COLUMNS / 64; ++block) {
            const float factor = rows.factor[half] * keys[block];
            if (HIDDEN) {
#pragma unroll
                for (int i = 32 * block + 2 * half; i < 32 * block + 32; i += 4)
                    top[half] = fmaxf(fmaxf(top[half], exponent<HIDDEN>(scores, i, factor, START * factor, seen)),
                                      exponent<HIDDEN>(scores, i + 1, factor, START * factor, seen));
            } else {  // of floats that are not all below 0 the largest has the largest bits
                int most = __float_as_int(as_float(scores[32 * block + 2 * half]));
#pragma unroll
                for (int i = 32 * block + 2 * half; i < 32 * block + 32; i += 4)
                    most = __vimax3_s32(most, __float_as_int(as_float(scores[i])), __float_as_int(as_float(scores[i + 1])));
                below |= most < 0;
                top[half] = fmaxf(top[half], (__int_as_float(most) - START) * factor);
            }
        }
    }
    if (!HIDDEN && __builtin_expect(__any_sync(~0u, below), 0)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = LOWEST;
#pragma unroll
            for (int i = 2 * half; i < Config::COLUMNS / 2; i += 4) {
                const float factor = rows.factor[half] * keys[i / 32];
                top[half] = fmaxf(fmaxf(top[half], (as_float(scores[i]) - START) * factor), (as_float(scores[i + 1]) - START) * factor);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = largest_of_row(top[half]);
        const bool seen_any = top[half] > LOWEST;
        top[half] = seen_any ? fmaxf(top[half], rows.most[half] - 20.f) : rows.top[half];
        rows.most[half] = fmaxf(rows.most[half], top[half]);
        rows.scale[half] = exp2_approx(rows.top[half] - top[half]);
        rows.total[half] *= rows.scale[half];
        rows.top[half] = top[half];
    }
}

// Whether references moved, so that out has to be scaled.
template <bool HIDDEN>
__device__ __forceinline__ bool weigh(Weights& weights, const Scores& scores, Rows& rows, const KeyFactors& keys, const Seen& seen) {
    float sums[2];
    int most[2];
    if (!Config::LAGGING) {
        choose_references<HIDDEN>(rows, scores, keys, seen);
        make_weights<HIDDEN>(weights, sums, most, scores, rows, keys, seen);
        rows.total[0] += sums[0], rows.total[1] += sums[1];
        return true;
    }
    make_weights<HIDDEN>(weights, sums, most, scores, rows, keys, seen);
    const bool moves = has_to_move(most, rows);
    if (__builtin_expect(moves, 0)) {
        rows.scale[0] = rows.scale[1] = 1.f;
        Seen again = seen;  // not kept as predicates from above
        if (HIDDEN) asm volatile("" : "+r"(again.low[0]), "+r"(again.low[1]), "+r"(again.high[0]), "+r"(again.high[1]));
        move_references<HIDDEN>(rows, most, scores, keys, again);
        make_weights<HIDDEN>(weights, sums, most, scores, rows, keys, again);
    }
    rows.total[0] += sums[0], rows.total[1] += sums[1];
    return moves;
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
