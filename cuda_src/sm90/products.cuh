// The two products of a warpgroup, whose operands in shared memory are descriptors: a low word with the address, which is
// all that moves, and a constant high word (PTX ISA, matrix descriptors of wgmma).
#pragma once

#include "sm90/softmax.cuh"
#include "common/ptx_wgmma.cuh"

namespace cuflash {

constexpr u32 SWIZZLE = Config::ROW_BYTES == 128 ? 1 : 2;  // of 128 or 64 bytes
constexpr u64 DESCRIPTOR = u64((8 * Config::ROW_BYTES >> 4) | SWIZZLE << 30) << 32;  // 8 rows to the next 8

__device__ __forceinline__ u32 low_word(u32 address, u32 leading_bytes) {
    return ((address & 0x3ffff) >> 4) | (leading_bytes >> 4) << 16;
}

// Words to add for step `step` of 16 columns, in panels of `rows` rows.
__device__ __forceinline__ constexpr u32 column_step(int step, int rows) {
    constexpr int STEPS = Config::PANEL / 16;
    return (step / STEPS * rows * Config::ROW_BYTES + step % STEPS * 32) >> 4;
}

// scores = Q Kᵀ
__device__ __forceinline__ void multiply_queries_and_keys(Scores& scores, u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < Config::D / 16; ++step) {
        const u64 keys = DESCRIPTOR | (k + column_step(step, Config::BN));
        multiply_keys(scores, DESCRIPTOR | (q + column_step(step, 64)), keys, step > 0, Config::Element());
    }
}

// out += P V
__device__ __forceinline__ void multiply_weights_and_values(Out& out, const Weights& weights, u32 v) {
#pragma unroll
    for (int step = 0; step < Config::BN / 16; ++step) {
        const u32 rows[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        multiply_values(out, rows, DESCRIPTOR | (v + (step * 16 * Config::ROW_BYTES >> 4)), true, Config::Element());
    }
}

}  // namespace cuflash
