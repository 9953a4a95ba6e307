// The five products of a warpgroup, whose lines are 64 keys but for dQ, whose lines are queries.
#pragma once

#include "common/operands.cuh"
#include "common/ptx_wgmma.cuh"
#include "sm90_backward/work.cuh"

namespace cuflash {

typedef float Scores[Config::BM / 2];   // (keys, queries), and their gradients
typedef u32 Weights[Config::BM / 4];    // the same as a product takes them
typedef float KeySums[Config::D / 2];   // dK
typedef float ValueSums[Config::DV / 2];
typedef float QuerySums[Config::DQ_COLUMNS / 2];  // what a warpgroup multiplies of a tile of dQ at a time

// scores = a bᵀ over WIDTH columns: a has BN rows, of which `a` is at the first of the warpgroup's; b has those of queries.
template <int WIDTH>
__device__ __forceinline__ void multiply_rows(Scores& scores, u32 a, u32 b) {
    work_out_here(a);
#pragma unroll
    for (int step = 0; step < WIDTH / 16; ++step)
        multiply_keys(scores, descriptor(Config::ROW) | (a + column_step(step, Config::BN, Config::ROW)),
                      descriptor(Config::ROW) | (b + column_step(step, Config::BM, Config::ROW)), step > 0, Config::Element());
}

// sums += weights b, where b has rows of queries.
template <int COUNT>
__device__ __forceinline__ void multiply_by_queries(float (&sums)[COUNT], const Weights& weights, u32 b) {
#pragma unroll
    for (int step = 0; step < Config::BM / 16; ++step) {
        const u32 a[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
        multiply_values(sums, a, descriptor(Config::ROW) | (b + row_step(step, Config::ROW)), true, Config::Element());
    }
}

// dQ = dS K, where dS lies in panels of 64 keys.
__device__ __forceinline__ void multiply_by_keys(QuerySums& sums, u32 scores, u32 k) {
    work_out_here(k);
#pragma unroll
    for (int step = 0; step < Config::BN / 16; ++step)
        multiply_tiles(sums, descriptor(128) | (scores + column_step(step, Config::BM, 128)),
                       descriptor(Config::ROW) | (k + row_step(step, Config::ROW)), step > 0, Config::Element());
}

}  // namespace cuflash
