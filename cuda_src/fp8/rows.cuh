// A tile of Q or K: centred, balanced, rotated, in units of its scales.
//
// A thread has a whole row, or with LANES above 1 a part of it that is as many lanes apart as a warp has rows: a rotation
// then is additions of registers, with few exchanges or none.
//
// Where lanes have to exchange, it is half of what they have: of each pair of lanes one computes sums and differences of
// the lower half of its channels, one of the upper. For each such step a bit of the channel within the part and a bit of the
// part change places. The half to keep is to be in the same registers of both, so the lane with the upper part loads these
// halves turned about, and has differences where the other has sums from then on.
#pragma once

#include "fp8/tile.cuh"

namespace cuflash {

constexpr int LANES = THREADS / TILE;  // that share a row
constexpr int CHANNELS = D / LANES;    // of a thread
constexpr int WARP_ROWS = 32 / LANES;  // neighbours, the first a multiple of 8

constexpr bool EXCHANGED = MIXED > CHANNELS;  // between lanes
static_assert(!EXCHANGED || MIXED == D, "all lanes of a row, or none");

typedef float Channels[CHANNELS];

// Which half of the registers goes to the lane that is `lanes` parts away, by the distance of its halves.
__device__ __forceinline__ constexpr int half_sent(int lanes) { return CHANNELS / 2 / lanes; }

// By which bits of their numbers the registers of a part are turned about.
__device__ __forceinline__ int turned(int part) {
    int bits = 0;
    if (EXCHANGED) {
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) bits |= part & lanes ? half_sent(lanes) : 0;
    }
    return bits;
}

// Which channel of the row a register has after the rotation. Those of 16 registers are neighbours.
__device__ __forceinline__ int channel_of(int at, int part) {
    if (!EXCHANGED) return part * CHANNELS + at;
    const int bits = at ^ turned(part);
    int channel = turned(part) + bits % (CHANNELS / LANES);
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) channel += bits & half_sent(lanes) ? CHANNELS * lanes : 0;
    return channel;
}

// What a thread has of its row, times the factors, K without its mean. No multiplication may merge with an addition, here
// and below: NumPy's codes would differ.
template <bool OF_K>
__device__ __forceinline__ void load_row(Channels& x, const unsigned char* row, const float* means, const float* factors,
                                         int turned) {
#pragma unroll
    for (int at = 0; at < CHANNELS; at += 8) {
        const int from = at ^ turned;
        float eight[8];
        to_floats(eight, *reinterpret_cast<const uint4*>(row + 2 * from));
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            const float4 factor = *reinterpret_cast<const float4*>(factors + from + half);
            float* four = eight + half;
            if (OF_K) {
                const float4 mean = *reinterpret_cast<const float4*>(means + from + half);
                four[0] -= mean.x, four[1] -= mean.y, four[2] -= mean.z, four[3] -= mean.w;
            }
            x[at + half] = __fmul_rn(four[0], factor.x), x[at + half + 1] = __fmul_rn(four[1], factor.y);
            x[at + half + 2] = __fmul_rn(four[2], factor.z), x[at + half + 3] = __fmul_rn(four[3], factor.w);
        }
    }
}

// A row of Q as it came times K's mean.
__device__ __forceinline__ float times_mean(const unsigned char* row, const float* means) {
    float sum = 0.f;
#pragma unroll 2
    for (int at = 0; at < CHANNELS; at += 8) {
        float eight[8];
        to_floats(eight, *reinterpret_cast<const uint4*>(row + 2 * at));
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += eight[i] * means[at + i];
    }
#pragma unroll
    for (int other = WARP_ROWS; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    return sum;
}

// Walsh-Hadamard of each MIXED channels, from the lowest bit up. Of a row the answer is the largest size, with any sign.
__device__ __forceinline__ float mix(Channels& x) {
    float most[4] = {};  // apart, so that none waits for the one before
    // Sums and differences of registers that are `half` apart; of what is turned about where `sign` is -1.
    auto add = [&](int half, float sign, bool last) {
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) {
            if (i & half) continue;
            const float low = x[i], high = x[i + half];
            x[i] = sign * low + high, x[i + half] = low - sign * high;
            // The larger of the two in size, rounded as it is; to add takes half as long as to compare.
            if (last) most[i % 4] = larger(most[i % 4], fabsf(low) + fabsf(high));
        }
    };
    auto sign_of = [](int lanes) { return threadIdx.x & lanes * WARP_ROWS ? -1.f : 1.f; };
#pragma unroll
    for (int half = 1; half < min(MIXED, CHANNELS); half *= 2) {
        const int lanes = CHANNELS / 2 / half;  // apart, which exchange these halves afterwards
        add(half, EXCHANGED && lanes < LANES ? sign_of(lanes) : 1.f, 2 * half == MIXED);
    }
    if (EXCHANGED) {
#pragma unroll
        for (int lanes = 1; lanes < LANES; lanes *= 2) {
            const int half = half_sent(lanes);
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i)
                if (i & half) x[i] = __shfl_xor_sync(~0u, x[i], lanes * WARP_ROWS);
            add(half, sign_of(lanes), 2 * lanes == LANES);
        }
    }
    if (MIXED == 1) {
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) most[i % 4] = larger(most[i % 4], x[i]);
    }
    float all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
#pragma unroll
    for (int other = WARP_ROWS; other < 32; other *= 2) all = larger(all, __shfl_xor_sync(~0u, all, other));
    return all;
}

// The largest size in the rows that share a scale with this one.
__device__ __forceinline__ float largest_of_group(float size, int sharing) {
    __shared__ float sizes[WARPS][4];
    if (sharing == TOKEN) return fabsf(size);
    const int warp = threadIdx.x / 32, columns = threadIdx.x % 8 / 2;
#pragma unroll
    for (int other = 1; other < WARP_ROWS; other *= 2) {
        const bool same_columns = other == 1 || other >= (TILE == 64 ? 4 : 8);
        if (same_columns || sharing != COLUMNS) size = larger(size, __shfl_xor_sync(~0u, size, other));
    }
    if (threadIdx.x % 32 < 8) sizes[warp][columns] = size;
    __syncthreads();  // readers of the tile before are past another
#pragma unroll
    for (int other = 0; other < WARPS; ++other)
        if (TILE == 64 || sharing != BLOCK_64 || other / (WARPS / 2) == warp / (WARPS / 2)) size = larger(size, sizes[other][columns]);
    return fabsf(size);
}

__device__ __forceinline__ u32 encode(float a, float b, float c, float d, E4m3) { return pack(a, b, c, d, E4m3()); }

// Added to 1.5 * 2^23, numbers below 2^22 in size are rounded to integers, in the lowest bits.
__device__ __forceinline__ u32 encode(float a, float b, float c, float d, Int8) {
    auto rounded = [](float x) { return u32(__float_as_int(__fadd_rn(x, 12582912.f))); };
    return __byte_perm(__byte_perm(rounded(a), rounded(b), 0x0040), __byte_perm(rounded(c), rounded(d), 0x0040), 0x5410);
}

template <bool OF_K>
__device__ __forceinline__ void quantize_rows(Stage& stage, const Work& work, const Arguments& a) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * WARP_ROWS, in_tile = first + lane % WARP_ROWS;
    const int part = lane / WARP_ROWS, row = work.first_row(a) + work.distance(in_tile, a);
    unsigned char* own = stage.rows[in_tile];

    if (!OF_K && a.lse_shifts != nullptr) {
        const float shift = times_mean(own + 2 * part * CHANNELS, stage.means + part * CHANNELS);
        if (part == 0 && row < work.length) a.lse_shifts[work.head_of_all * a.q_len + row] = shift;
    }
    Channels x;
    const int place = part * CHANNELS;
    load_row<OF_K>(x, own + 2 * place, stage.means + place, stage.factors + place, turned(part));
    float size = mix(x);
    if (row >= work.end) size = 0.f;
    const float scale = scale_for(largest_of_group(size, OF_K ? a.k_sharing : a.q_sharing), LARGEST_QK);
    if (!OF_K) {
        if (part == 0 && row < work.length) a.q_scales[work.head_of_all * a.q_len + row] = scale;
    } else {
        int key = TILE == 64 ? row % 128 : in_tile;
        asm volatile("" : "+r"(key));  // else what follows from it is kept from tile to tile, for which a register lacks
        const int block = (TILE == 64 ? work.tile / 2 : work.tile) * 2 + key / 64;
        if (part == 0 && key % 64 < 8 && key % 2 == 0)  // of each 64 keys those of each thread of four
            a.k_scales[(work.head_of_all * a.key_blocks + block) * 4 + key % 8 / 2] = scale;
    }

    // Codes take the place of the warp's rows, from where they leave in whole lines.
    const float inverse = row < work.end ? inverse_of(scale) : 0.f;
    __syncwarp();
#pragma unroll
    for (int at = 0; at < CHANNELS; at += 16) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* four = x + at + 4 * i;
            const u32 word = encode(__fmul_rn(four[0], inverse), __fmul_rn(four[1], inverse), __fmul_rn(four[2], inverse),
                                    __fmul_rn(four[3], inverse), CONFIG_QK_ELEMENT());
            words[i] = inverse == 0.f ? 0 : word;  // neither NaN nor -0
        }
        *reinterpret_cast<uint4*>(own + channel_of(at, part)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
    constexpr int ROW_UNITS = D / 16;
    const int first_of_warp = work.first_row(a) + work.distance(first, a);
    unsigned char* to = (OF_K ? a.k_codes : a.q_codes) + (work.head_of_all * work.length + first_of_warp) * D;
#pragma unroll
    for (int i = lane; i < WARP_ROWS * ROW_UNITS; i += 32) {
        const int place = i / ROW_UNITS, distance = work.distance(place, a);  // the warp's first place is a multiple of 4
        if (first_of_warp + distance < work.length)
            *reinterpret_cast<uint4*>(to + 16 * i + (distance - place) * D) =
                *reinterpret_cast<const uint4*>(stage.rows[first + place] + i % ROW_UNITS * 16);
    }
}

}  // namespace cuflash
