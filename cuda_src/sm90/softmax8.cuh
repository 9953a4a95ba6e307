// Scores of a warpgroup's 64 lines become weights of 8 bits (e4m3).
//
// Each tile has a reference of its own, at most 2^20 below the largest so far: its largest weight fills e4m3's range, and what
// is summed moves from one reference to the next. Scores are sums of products of 8 bits; a row has a scale, and so have
// the 16 of each 64 keys that one thread of four holds (SageAttention2, Zhang et al. 2024, section 3.2).
#pragma once

#include "sm90/lines.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

constexpr float MOST = 448.f, LOG2_MOST = 8.807354922f;  // of e4m3
constexpr float LOWEST = -1e30f;  // a reference of rows that see nothing: finite, so that the difference of two is 0
constexpr float TINY = 1e-15f;    // for a scale of 0, which times a hidden score would be NaN
constexpr bool WHOLE = Score(0.5f) == 0;  // integers

// Integers start at the bits of 1.5 * 2^23: read as floats they are that and the sum, which is below 2^22, exactly.
constexpr bool ADD_TO_START = WHOLE;
constexpr float START = WHOLE ? 12582912.f : 0.f;
__device__ __forceinline__ void start_scores(Scores& scores) {
    if (!WHOLE) return;
#pragma unroll
    for (int i = 0; i < Config::BN / 2; ++i) scores[i] = Score(0x4b400000);
}
__device__ __forceinline__ float as_float(float score) { return score; }
__device__ __forceinline__ float as_float(int score) { return __int_as_float(score); }
__device__ __forceinline__ void put(float& score, float value) { score = value; }
__device__ __forceinline__ void put(int& score, float value) { score = __float_as_int(value); }
__device__ __forceinline__ int bits_of(float score) { return __float_as_int(score); }
__device__ __forceinline__ int bits_of(int score) { return score; }

__device__ __forceinline__ void prepare_scores(Scores&, float) {}

struct KeyScales {
    const float* all;  // of the head, as this thread needs them
    float of[Config::BN / 64];

    __device__ __forceinline__ KeyScales(const Work& work, const Arguments& a) {
        const int kv_heads = a.q_heads / a.group;
        all = a.k_scales + (i64(work.entry) * kv_heads + work.head / a.group) * a.key_blocks * 4 + threadIdx.x % 4;
    }
    // Asked for before the scores are, which take longer. A NaN stays one.
    __device__ __forceinline__ void load(int tile) {
#pragma unroll
        for (int block = 0; block < Config::BN / 64; ++block) {
            const float scale = __ldg(all + (tile * (Config::BN / 64) + block) * 4);
            of[block] = scale == 0.f ? TINY : scale;
        }
    }
};

struct Rows {
    float top[2], most[2];    // reference, largest score so far, in units of log2
    float total[2], scale[2];  // sum of weights; what out is still to be multiplied by
    float factor[2];          // of a score, to units of log2, but for the scale of the key

    __device__ __forceinline__ void reset(const float (&scales)[2], const Arguments& a) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            top[half] = most[half] = LOWEST, total[half] = 0.f, scale[half] = 1.f;
            factor[half] = (scales[half] == 0.f ? TINY : scales[half]) * a.factor;
        }
    }
};

// Largest score of 16 columns, of which the bits are compared: right where one is not below 0, as sums that START leaves are.
__device__ __forceinline__ int largest_bits(const Scores& scores, int first) {
    int most = bits_of(scores[first]);
#pragma unroll
    for (int i = first; i < first + 32; i += 4) most = __vimax3_s32(most, bits_of(scores[i]), bits_of(scores[i + 1]));
    return most;
}
__device__ __forceinline__ float largest(const Scores& scores, int first) {
    float most = as_float(scores[first]);
#pragma unroll
    for (int i = first; i < first + 32; i += 4)
        most = fmaxf(fmaxf(most, as_float(scores[i])), as_float(scores[i + 1]));
    return most;
}

// Scores become weights, 2^(score - top) * MOST.
template <bool FIRST = false>
__device__ __forceinline__ void weigh(Scores& scores, Rows& rows, const KeyScales& keys, const Arguments& a) {
    float tile[2];
    bool below = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        tile[half] = LOWEST;
#pragma unroll
        for (int block = 0; block < Config::BN / 64; ++block) {
            const int bits = largest_bits(scores, 32 * block + 2 * half);
            below |= bits < 0;
            tile[half] = fmaxf(tile[half], (__int_as_float(bits) - START) * (rows.factor[half] * keys.of[block]));
        }
    }
    if (__any_sync(~0u, below)) {  // of negative floats the bits compare the wrong way
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            tile[half] = LOWEST;
#pragma unroll
            for (int block = 0; block < Config::BN / 64; ++block)
                tile[half] = fmaxf(tile[half], (largest(scores, 32 * block + 2 * half) - START) *
                                                   (rows.factor[half] * keys.of[block]));
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        tile[half] = fmaxf(tile[half], __shfl_xor_sync(~0u, tile[half], 1));
        tile[half] = fmaxf(tile[half], __shfl_xor_sync(~0u, tile[half], 2));
        rows.most[half] = fmaxf(rows.most[half], tile[half]);
        const float top = fmaxf(tile[half], rows.most[half] - 20.f);
        rows.scale[half] = exp2_approx(rows.top[half] - top);
        rows.total[half] *= rows.scale[half];
        rows.top[half] = top;
        const float offset = top - LOG2_MOST;
#pragma unroll
        for (int block = 0; block < Config::BN / 64; ++block) {
            const float factor = rows.factor[half] * keys.of[block];
            const float shift = WHOLE ? fmaf(START, factor, offset) : offset;
#pragma unroll
            for (int i = 32 * block + 2 * half; i < 32 * block + 32; i += 4) {
                const float low = exp2_approx(as_float(scores[i]) * factor - shift);
                const float high = exp2_approx(as_float(scores[i + 1]) * factor - shift);
                rows.total[half] += low + high;
                put(scores[i], low), put(scores[i + 1], high);
            }
        }
    }
}

// Keys lie in V as they come here: of 16, those in columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t one after the other.
__device__ __forceinline__ void pack_weights(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int i = 0; i < Config::BN / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = 8 * i + 2 * half;
            weights[2 * i + half] = pack(as_float(scores[at]), as_float(scores[at + 1]), as_float(scores[at + 4]),
                                         as_float(scores[at + 5]), Config::VElement());
        }
    }
}

// Natural logarithm of a row's sum of exponentials, without what lse_shifts adds.
__device__ __forceinline__ float lse_of(const Rows& rows, int half, float total, const Arguments&) {
    return 0.693147181f * (rows.top[half] - LOG2_MOST + __log2f(total));
}

__device__ __forceinline__ void scale_out(Out& out, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < Config::DV / 2; ++i) out[i] *= rows.scale[i / 2 % 2];
}

}  // namespace cuflash
#endif
