// Products of tiles in shared memory by one warp, 16x16 blocks at a time; sums stay in registers.
//
// The left operand is A of mma.m16n8k16, the right one B. Each may lie as its rows, along which the sum runs, or transposed.
// Both layouts come out of one matrix load: with `.trans` where the sum runs down the rows of shared memory.
#pragma once

#include "sm80/tiles.cuh"

namespace cuflash {

// Sums of a warp: tiles of 16 rows x pairs of tiles of 8 columns. Lane l holds rows l / 4 and l / 4 + 8 of each tile,
// columns 2 * (l % 4) and the next: elements 0 and 1 of the first row, 2 and 3 of the second.
template <int ROWS, int COLUMN_PAIRS>
struct Sums {
    static constexpr int ROW_TILES = ROWS, COLUMN_TILES = 2 * COLUMN_PAIRS;
    static constexpr int FLOATS = ROW_TILES * COLUMN_TILES * 128;  // of all lanes
    float of[ROW_TILES][COLUMN_TILES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) of[r][n][e] = 0.f;
    }
};

// Lanes that load by rows of 8 columns first, or by columns of 8 rows first.
__device__ __forceinline__ u32 rows_first(int lane) { return unit_offset(lane % 16, lane / 16); }
__device__ __forceinline__ u32 columns_first(int lane) { return unit_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2); }

// An operand whose rows are those of a tile of ROWS rows; `address` is that of its first row.
template <int ROWS>
struct ByRows {
    u32 address, lane;
    __device__ __forceinline__ void load(u32 (&to)[4], int tile, int step) const {
        load_matrices(to, address + step_offset<ROWS>(lane, step) + 2048 * tile);
    }
};

// An operand whose rows are columns of a tile of ROWS rows. GROUPS share them: each has every GROUPS-th block of 16, which
// an XOR with its number tells apart.
template <int ROWS, int GROUPS>
struct ByColumns {
    static_assert(GROUPS == 1 || GROUPS == 2 || GROUPS == 4, "a panel has four blocks");
    u32 address, lane;
    __device__ __forceinline__ void load(u32 (&to)[4], int tile, int step) const {
        load_matrices_transposed(to, address + step_offset<ROWS>(lane, GROUPS * tile) + 2048 * step);
    }
};

template <int ROWS>
__device__ __forceinline__ ByRows<ROWS> left_by_rows(u32 tile, int first_row) {
    return {tile + 128 * first_row, rows_first(threadIdx.x % 32)};
}

template <int ROWS>
__device__ __forceinline__ ByRows<ROWS> right_by_rows(u32 tile, int first_row) {
    return {tile + 128 * first_row, columns_first(threadIdx.x % 32)};
}

template <int ROWS, int GROUPS>
__device__ __forceinline__ ByColumns<ROWS, GROUPS> left_by_columns(u32 tile, int group) {
    return {tile, columns_first(threadIdx.x % 32) ^ 32 * group};
}

template <int ROWS, int GROUPS>
__device__ __forceinline__ ByColumns<ROWS, GROUPS> right_by_columns(u32 tile, int group) {
    return {tile, rows_first(threadIdx.x % 32) ^ 32 * group};
}

// sums += left right, over STEPS steps of 16
template <class Element, int STEPS, int UNROLL, int ROW_TILES, int COLUMN_PAIRS, class Left, class Right>
__device__ __forceinline__ void multiply_tiles(Sums<ROW_TILES, COLUMN_PAIRS>& sums, const Left& left,
                                               const Right& right) {
#pragma unroll UNROLL
    for (int step = 0; step < STEPS; ++step) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) left.load(a[r], r, step);
#pragma unroll
        for (int n = 0; n < COLUMN_PAIRS; ++n) {
            u32 b[4];
            right.load(b, n, step);
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                multiply(sums.of[r][2 * n], a[r], b[0], b[1], Element());
                multiply(sums.of[r][2 * n + 1], a[r], b[2], b[3], Element());
            }
        }
    }
}

}  // namespace cuflash
