// The two products of a warpgroup.
#pragma once

#include "sm90/softmax.cuh"
#include "sm90/softmax8.cuh"
#include "common/operands.cuh"
#include "common/ptx_wgmma.cuh"

namespace cuflash {

// products = Q Kᵀ
__device__ __forceinline__ void multiply_queries_and_keys(Products& products, u32 q, u32 k) {
#pragma unroll
    for (int step = 0; step < Config::D * Config::ITEM / 32; ++step) {
        const u64 queries = descriptor(Config::QK_ROW) | (q + column_step(step, 64, Config::QK_ROW));
        const u64 keys = descriptor(Config::QK_ROW) | (k + column_step(step, Config::BN, Config::QK_ROW));
        multiply_keys(products, queries, keys, step > 0, Config::QkElement());
    }
}

// out += P V
__device__ __forceinline__ void multiply_weights_and_values(Out& out, const Weights& weights, u32 v) {
#pragma unroll
    for (int step = 0; step < Config::BN * Config::ITEM / 32; ++step) {
        const u32 rows[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        const u32 at = Config::EIGHT ? column_step(step, Config::DV, Config::V_ROW)
                                     : row_step(step, Config::V_ROW);
        multiply_values(out, rows, descriptor(Config::V_ROW) | (v + at), true, Config::VElement());
    }
}

// The same with the values of the first keys, of 16 bits: `first` are those of a tile.
__device__ __forceinline__ void multiply_weights_and_first_values(Out& out, const Weights16& weights, u32 first) {
#pragma unroll
    for (int step = 0; step < Config::BN / 16; ++step) {
        const u32 rows[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        multiply_values(out, rows, descriptor(128) | (first + row_step(step, 128)), true, Float16());
    }
}

}  // namespace cuflash
