// What is done to each row of queries before and after: a block for each tile of queries of each head.
#pragma once

#include "sm90_backward/config.cuh"

namespace cuflash {

constexpr int ROWS_THREADS = 256;
constexpr int LANES = 8;  // threads of a row, 16 bytes each at a time

// The tile of a block.
struct QueryTile {
    int index;  // of all
    int entry, head, first_row, used;  // used: rows of the entry

    // The last comes first: `finish` finds its sums in the L2 cache, `prepare` leaves there what is needed first.
    __device__ __forceinline__ explicit QueryTile(const Arguments& a) : index(gridDim.x - 1 - blockIdx.x) {
        const int head_of_all = index / a.q_tiles;
        first_row = (index - head_of_all * a.q_tiles) * Config::BM;
        entry = head_of_all / a.q_heads, head = head_of_all - entry * a.q_heads;
        used = used_length(a.q_lens, entry, a.q_len);
    }
    __device__ __forceinline__ i64 place(const i64 (&steps)[3], int row) const {
        return entry * steps[0] + head * steps[1] + (first_row + row) * steps[2];
    }
};

__device__ __forceinline__ float dot(const uint4& x, const uint4& y) {
    const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum = fmaf(high_of(xs[i], Config::Element()), high_of(ys[i], Config::Element()), sum);
        sum = fmaf(low_of(xs[i], Config::Element()), low_of(ys[i], Config::Element()), sum);
    }
    return sum;
}

// What the gradient of a row's weights lacks, sum(dO * O); LSE in units of log2, +inf for a row that sees no key or is none,
// so that its weights are 0; dQ of the first section and counters start at 0.
__device__ __forceinline__ void prepare_rows(const Arguments& a) {
    await_kernel_before(), let_next_kernel_start();
    const QueryTile tile(a);
    const int lane = threadIdx.x % LANES;
    const float infinity = -minus_infinity();
#pragma unroll
    for (int first = 0; first < Config::BM; first += ROWS_THREADS / LANES) {
        const int row = first + threadIdx.x / LANES;
        const bool there = tile.first_row + row < tile.used;
        float sum = 0.f;
#pragma unroll
        for (int at = 0; at < Config::DV; at += 8 * LANES) {
            const int column = at + 8 * lane;
            if (there && column < a.head_dim_v)
                sum += dot(*reinterpret_cast<const uint4*>(static_cast<const u16*>(a.out) + tile.place(a.out_steps, row) + column),
                           *reinterpret_cast<const uint4*>(static_cast<const u16*>(a.dout_rows) + tile.place(a.dout_steps, row) +
                                                           column));
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane != 0) continue;
        const float lse = there ? a.lse[tile.place(a.lse_steps, row)] : minus_infinity();
        float* stats = a.row_stats + i64(tile.index) * Config::BM + place_of_row(row);
        stats[0] = lse == minus_infinity() ? infinity : lse * 1.44269504f;
        stats[a.all_rows] = lse == minus_infinity() ? 0.f : sum;
    }
    float4* sums = reinterpret_cast<float4*>(a.sums) + i64(tile.index) * (Config::BM * Config::D / 4);
    if (a.sections == 1 || tile.index < i64(a.section * a.group) * a.q_tiles) {
#pragma unroll
        for (int i = 0; i < Config::BM * Config::D / 4; i += ROWS_THREADS) sums[i + threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    const i64 counters = first_turn(a) - a.counters + (Config::ORDERED ? a.all_rows / Config::BM : 0);
    for (i64 i = i64(blockIdx.x) * ROWS_THREADS + threadIdx.x; i < counters; i += i64(gridDim.x) * ROWS_THREADS)
        a.counters[i] = 0;
}

// dQ to 16 bits, from the order in which a warpgroup's threads held it.
__device__ __forceinline__ void finish_rows(const Arguments& a) {
    constexpr int WIDTH = Config::D + 8;  // elements: rows start in different banks
    __shared__ __align__(16) u16 rounded[Config::BM * WIDTH];
    await_kernel_before(), let_next_kernel_start();
    const QueryTile tile(a);
    const float4* sums = reinterpret_cast<const float4*>(a.sums) + i64(tile.index) * (Config::BM * Config::D / 4);
#pragma unroll 8
    for (int i = threadIdx.x; i < Config::BM * Config::D / 4; i += ROWS_THREADS) {
        const float4 sum = sums[i];
        constexpr int OF_SHARE = Config::DQ_ROWS * Config::DQ_SHARE / 4;
        const int share = i / OF_SHARE, in_share = i % OF_SHARE, thread = in_share % 128;
        const int row = (Config::SHARE == LINES ? 64 * share : 0) + thread / 32 * 16 + thread % 32 / 4;
        const int column = (Config::SHARE == COLUMNS ? Config::DQ_SHARE * share : 0) + in_share / 128 * 8 + thread % 4 * 2;
        u16* to = rounded + row * WIDTH + column;
        *reinterpret_cast<u32*>(to) = pack(sum.x * a.scale, sum.y * a.scale, Config::Element());
        *reinterpret_cast<u32*>(to + 8 * WIDTH) = pack(sum.z * a.scale, sum.w * a.scale, Config::Element());
    }
    __syncthreads();
    constexpr int UNITS = Config::D / 8;
    for (int i = threadIdx.x; i < Config::BM * UNITS; i += ROWS_THREADS) {
        const int row = i / UNITS, column = i % UNITS * 8;
        if (tile.first_row + row >= a.q_len || column >= a.head_dim) continue;
        const bool used = tile.first_row + row < tile.used;  // else 0, even where keys are not finite
        const uint4 zero = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(static_cast<u16*>(a.dq) + tile.place(a.dq_steps, row) + column) =
            used ? *reinterpret_cast<const uint4*>(rounded + row * WIDTH + column) : zero;
    }
}

}  // namespace cuflash
