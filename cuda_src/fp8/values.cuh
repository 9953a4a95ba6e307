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

// A warp takes 8 channels at a time, of all keys: a lane one channel, and of each 16 keys those that a thread of four has in
// the operand of a product, 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t, which are neighbours in memory for that reason.
__device__ __forceinline__ void quantize_values(Stage& stage, const Work& work, const Arguments& a) {
    constexpr int GROUPS = TILE / 16;
    const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
    const int keys = work.end - work.tile * TILE;  // may be more or less than there are here
    const i64 first_channel = work.head_of_all(a) * D, length = i64(a.key_blocks) * 64;
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
            if (a.code_sums != nullptr) {
                const float2 first = decode(word & 0xffff), second = decode(word >> 16);
                sum += (first.x + first.y) + (second.x + second.y);
            }
            // The codes take the place of the 8 channels, 16 keys in the 16 bytes of a row, so that no bank is met twice: now
            // by lanes of all channels, below by those of a channel's groups.
            *reinterpret_cast<u32*>(&stage.rows[8 * group + (row ^ group)][2 * channels + 4 * t]) = word;
        }
        if (a.code_sums != nullptr) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (t == 0) a.code_sums[(work.head_of_all(a) * (a.key_blocks / 2) + work.tile) * D + channel] = sum;
        }
        __syncwarp();
#pragma unroll
        for (int i = lane; i < 8 * GROUPS; i += 32) {
            const int channel_row = i / GROUPS, group = i % GROUPS;
            unsigned char* to = a.v_codes + (first_channel + channels + channel_row) * length + work.tile * TILE + 16 * group;
            *reinterpret_cast<uint4*>(to) =
                *reinterpret_cast<const uint4*>(&stage.rows[8 * group + (channel_row ^ group)][2 * channels]);
        }
    }
}

}  // namespace cuflash
