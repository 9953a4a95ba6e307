// The kernels before and after the main one, which go through rows: a block has M of them, as the main kernel's tiles do.
#pragma once

#include "common/turns.cuh"
#include "sm80/backward_config.cuh"
#include "sm80/gradients.cuh"

namespace cuflash {

// The rows of a block.
struct RowBlock {
    int head_of_all, entry, head, first_row, q_len;

    __device__ __forceinline__ explicit RowBlock(const Arguments& a) {
        head_of_all = blockIdx.x / a.row_blocks;
        entry = head_of_all / a.q_heads, head = head_of_all % a.q_heads;
        first_row = blockIdx.x % a.row_blocks * Config::M;
        q_len = used_length(a.q_lens, entry, a.q_len);
    }
    __device__ __forceinline__ float* sums(const Arguments& a) const {
        return a.sums + i64(blockIdx.x) * (Config::M * Config::D);
    }
    __device__ __forceinline__ Row* rows(const Arguments& a) const {
        return a.rows + i64(blockIdx.x) * Config::M;
    }
};

// sum(dout * out) of a row, by 8 lanes.
__device__ __forceinline__ float sum_products(const u16* dout, const u16* out, int columns, bool aligned) {
    typedef Config::Element Element;
    const int part = threadIdx.x % 8;
    float sum = 0.f;
    if (aligned) {
        for (int unit = part; 8 * unit < columns; unit += 8) {
            const uint4 x = *reinterpret_cast<const uint4*>(dout + 8 * unit);
            const uint4 y = *reinterpret_cast<const uint4*>(out + 8 * unit);
            const u32 left[4] = {x.x, x.y, x.z, x.w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum = fmaf(low_of(left[i], Element()), low_of(right[i], Element()), sum);
                sum = fmaf(high_of(left[i], Element()), high_of(right[i], Element()), sum);
            }
        }
    } else {
        for (int c = part; c < columns; c += 8) sum = fmaf(low_of(dout[c], Element()), low_of(out[c], Element()), sum);
    }
#pragma unroll
    for (int away = 1; away < 8; away *= 2) sum += __shfl_xor_sync(~0u, sum, away);
    return sum;
}

// Describes each row, and clears what its dQ will be summed up in, and the counters of turns.
__device__ __forceinline__ void prepare_rows(const Arguments& a) {
    const RowBlock block(a);
    float4* sums = reinterpret_cast<float4*>(block.sums(a));
    for (int i = threadIdx.x; i < Config::M * Config::D / 4; i += ROW_THREADS) sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (Config::DETERMINISTIC) {
        if (threadIdx.x < Config::WARPS) a.counters[FIRST_TURN + i64(blockIdx.x) * Config::WARPS + threadIdx.x] = 0;
        if (blockIdx.x == 0 && threadIdx.x < FIRST_TURN) a.counters[threadIdx.x] = 0;
    }
    const u16* dout = a.dout + block.entry * a.dout_entry + block.head * a.dout_head;
    const u16* out = a.out + block.entry * a.out_entry + block.head * a.out_head;
    const float* lse = a.lse + block.entry * a.lse_entry + block.head * a.lse_head;
    for (int i = threadIdx.x / 8; i < Config::M; i += ROW_THREADS / 8) {
        const i64 row = block.first_row + i;
        const bool used = row < block.q_len;
        const float sum = sum_products(dout + row * a.dout_row, out + row * a.out_row, used ? a.head_dim_v : 0, a.out_aligned);
        const float natural = used ? lse[row * a.lse_row] : minus_infinity();
        const bool dead = natural == minus_infinity();
        // +inf is a row of infinite scores, whose weights are not finite: none of the dead. NaN stays.
        const float log2 = (natural > 2e38f ? 2e38f : natural) * 1.44269504f - Config::WEIGHT_SHIFT;
        const Row found = {dead ? infinity() : log2, dead ? 0.f : sum * SHIFT_BACK};
        if (threadIdx.x % 8 == 0) block.rows(a)[i] = found;
    }
}

// Sums of dQ, as the main kernel's fragments lie, to dQ.
__device__ __forceinline__ void finish_rows(const Arguments& a) {
    __shared__ __align__(128) unsigned char shared[Tile<Config::M, Config::D>::BYTES];
    const RowBlock block(a);
    const u32 tile = shared_address(shared);
    const int warp = threadIdx.x / 32;
    QuerySums sums;
    const float* from = block.sums(a) + warp * QuerySums::FLOATS;
#pragma unroll
    for (int r = 0; r < QuerySums::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < QuerySums::COLUMN_TILES; ++n)
            read_sums(sums.of[r][n], from + (r * QuerySums::COLUMN_TILES + n) * 128);
    const Row* rows = block.rows(a);
    put_sums<Config::Element, Config::M, Config::QUERY_GROUPS, Config::DQ_SIDES>(
        tile, sums, warp / Config::DQ_SIDES * 16, warp % Config::DQ_SIDES, a.scale,
        [&](int row) { return rows[row].lse != infinity(); });
    __syncthreads();
    u16* dq = a.dq + block.entry * a.dq_entry + block.head * a.dq_head + block.first_row * a.dq_row;
    store_tile<Config::M, Config::D, Config::THREADS>(tile, dq, a.dq_row, a.q_len - block.first_row, a.head_dim,
                                                      a.dq_aligned);
}

}  // namespace cuflash
