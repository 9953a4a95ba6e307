// A tile of V: centred, in units of its scales, channels as rows.
#pragma once

#include "fp8/tile.cuh"

namespace cuflash {

// cvt.rn.f16x2.e4m3x2 and on to floats.
__device__ __forceinline__ float2 decode(u16 codes) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return make_float2(low_of(pair, Float16()), high_of(pair, Float16()));
}

// Whether this block is the last of so many. What the others wrote before can then be read, from the L2 cache on.
__device__ __forceinline__ bool last_to_come(u32* count, u32 all) {
    __syncthreads();
    u32 before = 0;
    if (threadIdx.x == 0)
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return __syncthreads_or(threadIdx.x == 0 && before == all - 1);
}

// V's mean, taken out or not, was to be added to out as far as its codes lack it: they have a mean themselves, after
// rounding.
__device__ __forceinline__ void finish_means(const Work& work, const Arguments& a) {
    if (threadIdx.x >= D) return;
    const i64 at = work.head_of_all * D + threadIdx.x;
    const float sum = float(__ldcg(a.code_sums + at)) / 512.f, keys = max(work.end, 1);
    __stcg(a.v_means + at, __ldcg(a.v_means + at) - __ldcg(a.v_scales + at) * (sum / keys));
}

// The first values less their mean, which is known then.
__device__ __forceinline__ void keep_first_values(const Work& work, const Arguments& a) {
    __syncthreads();
    const int unit = threadIdx.x % UNITS, keys = unit * 8 < a.dim ? work.end : 0;
    const i64 head = work.head_of_all;
    const int entry = int(head) / a.kv_heads;
    uint4* to = reinterpret_cast<uint4*>(a.first_values) + head * (FIRST * UNITS);
    for (int key = threadIdx.x / UNITS; key < FIRST; key += THREADS / UNITS) {
        u32 words[4] = {};
        if (key < keys) {
            float x[8];
            to_floats(x, __ldg(reinterpret_cast<const uint4*>(row_of(a.v, entry, int(head) - entry * a.kv_heads, key) + unit * 8)));
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const i64 channel = head * D + unit * 8 + i;
                const float scale = __ldcg(a.v_scales + channel);
                x[i] = (x[i] - __ldcg(a.v_means + channel)) / (scale == 0.f ? 1.f : scale);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = pack(x[2 * i], x[2 * i + 1], Float16());
        }
        to[key * UNITS + unit] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The last of a head's tiles does what needs all.
__device__ __forceinline__ void finish_values(const Work& work, const Arguments& a) {
    if (!last_to_come(a.value_tiles + work.head_of_all, a.key_blocks / (TILE / 64))) return;
    if (a.residual_mean) finish_means(work, a);
    if (a.keep_first) keep_first_values(work, a);
}

// A warp takes 8 channels at a time, of all keys: a lane one channel, and of each 16 keys those that a thread of four has in
// the operand of a product, 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, which are neighbours in memory for that reason.
__device__ __forceinline__ void quantize_values(Stage& stage, const Work& work, const Arguments& a) {
    constexpr int GROUPS = TILE / 16, SLOTS = 8 / GROUPS;
    const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
    const int keys = work.end - work.tile * TILE;  // may be more or less than there are here
    const i64 first_channel = work.head_of_all * D, length = i64(a.key_blocks) * 64;
    for (int channels = threadIdx.x / 32 * 8; channels < D; channels += WARPS * 8) {
        const int channel = channels + row;
        const float mean = a.center_v ? stage.means[channel] : 0.f, inverse = inverse_of(stage.factors[channel]);
        u32 pairs[TILE / 32][4];  // two keys of the channel each
#pragma unroll
        for (int i = 0; i < TILE / 32; ++i)
            load_matrices_transposed(pairs[i], shared_address(&stage.rows[32 * i + lane][2 * channels]));
        __syncwarp();

        float sum = 0.f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const u32 near = pairs[group / 2][group % 2 * 2], far = pairs[group / 2][group % 2 * 2 + 1];
            auto scaled = [&](float x) { return __fmul_rn(x - mean, inverse); };
            u32 word = pack(scaled(low_of(near, CONFIG_ELEMENT())), scaled(high_of(near, CONFIG_ELEMENT())),
                            scaled(low_of(far, CONFIG_ELEMENT())), scaled(high_of(far, CONFIG_ELEMENT())), E4m3());
            if (inverse == 0.f) word = 0;
            if (keys < TILE) {
                const int left = keys - 16 * group - 2 * t;  // keys from this lane's first on
                word &= (left > 0 ? 0xff : 0) | (left > 1 ? 0xff00 : 0) | (left > 8 ? 0xff0000 : 0) | (left > 9 ? 0xff000000 : 0);
            }
            if (a.residual_mean) {
                const float2 first = decode(word & 0xffff), second = decode(word >> 16);
                sum += (first.x + first.y) + (second.x + second.y);
            }
            // The codes take the place of the 8 channels, 16 keys in the 16 bytes of a row, so that no bank is met twice:
            // now by lanes of all channels, below by those of a channel's groups.
            *reinterpret_cast<u32*>(&stage.rows[8 * group + (row ^ group * SLOTS)][2 * channels + 4 * t]) = word;
        }
        if (a.residual_mean) {
            int whole = int(sum * 512.f);
            whole += __shfl_xor_sync(~0u, whole, 1);
            whole += __shfl_xor_sync(~0u, whole, 2);
            if (t == 0) atomicAdd(reinterpret_cast<u64*>(a.code_sums + work.head_of_all * D + channel), u64(i64(whole)));
        }
        __syncwarp();
#pragma unroll
        for (int i = lane; i < 8 * GROUPS; i += 32) {
            const int channel_row = i / GROUPS, group = i % GROUPS;
            unsigned char* to = a.v_codes + (first_channel + channels + channel_row) * length + work.tile * TILE + 16 * group;
            *reinterpret_cast<uint4*>(to) =
                *reinterpret_cast<const uint4*>(&stage.rows[8 * group + (channel_row ^ group * SLOTS)][2 * channels]);
        }
    }
    if (a.residual_mean || a.keep_first) finish_values(work, a);
}

}  // namespace cuflash
