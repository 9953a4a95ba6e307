// How sums become gradients in memory: rounded, through a tile of shared memory, so that rows are written whole.
#pragma once

#include "sm80/products.cuh"

namespace cuflash {

// Sums of a warp, times `scale`, into a tile of ROWS rows: from first_row on every ROW_STEP-th block of 16 rows, and of the
// blocks of 16 columns every GROUPS-th. Rows that are not `used` become 0, whatever their sums are.
template <class Element, int ROWS, int ROW_STEP, int GROUPS, int ROW_TILES, int COLUMN_PAIRS, class Used>
__device__ __forceinline__ void put_sums(u32 tile, const Sums<ROW_TILES, COLUMN_PAIRS>& sums, int first_row, int group,
                                         float scale, const Used& used) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + 16 * ROW_STEP * r + 8 * half + lane / 4;
            const bool kept = used(row);
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_PAIRS; ++n) {
                const int unit = 2 * (GROUPS * (n / 2) + group) + n % 2;
                const float x = kept ? sums.of[r][n][2 * half] * scale : 0.f;
                const float y = kept ? sums.of[r][n][2 * half + 1] * scale : 0.f;
                store_pair(tile + unit / 8 * ROWS * 128 + unit_offset(row, unit % 8) + 4 * (lane % 4),
                           pack(x, y, Element()));
            }
        }
}

// The first rows of a tile to memory, by the whole block; the tile holds more columns than the matrix may have.
template <int ROWS, int COLUMNS, int THREADS>
__device__ __forceinline__ void store_tile(u32 tile, u16* matrix, i64 step, int rows, int columns, bool aligned) {
    constexpr int UNITS = COLUMNS / 8;
    for (int copy = threadIdx.x; copy < ROWS * UNITS; copy += THREADS) {
        const int row = copy / UNITS, unit = copy % UNITS;
        if (row >= rows || 8 * unit >= columns) continue;
        u32 pairs[4];
        load_unit(pairs, tile + unit / 8 * ROWS * 128 + unit_offset(row, unit % 8));
        u16* to = matrix + row * step + 8 * unit;
        if (aligned && 8 * unit + 8 <= columns) {
            *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (8 * unit + c < columns) to[c] = u16(pairs[c / 2] >> 16 * (c % 2));
        }
    }
}

}  // namespace cuflash
