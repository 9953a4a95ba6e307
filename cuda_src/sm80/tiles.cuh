// Tiles of 16-bit elements in shared memory, as the kernels of mma.sync keep them, and how they are filled.
//
// `Config` says with how many THREADS a block copies, and whether rows are ALIGNED: they start on 16 bytes and have a
// multiple of 8 columns.
#pragma once

#include "common/ptx_ampere.cuh"

namespace cuflash {

// A tile of 16-bit elements in shared memory: panels of 64 columns, whose 16-byte units are swizzled so that the 8 rows
// of a matrix load fall into different banks.
template <int ROWS, int COLUMNS>
struct Tile {
    static constexpr int BYTES = 2 * ROWS * ((COLUMNS + 63) / 64 * 64);
};

__device__ __forceinline__ int used_length(const i64* lens, int entry, int capacity) {
    if (lens == nullptr) return capacity;
    const i64 length = lens[entry];  // not checked on the host when it lives on the device
    return length < 0 ? 0 : length > capacity ? capacity : int(length);
}

// Offset of a 16-byte unit of a row in its panel.
__device__ __forceinline__ u32 unit_offset(int row, int unit) { return 128 * row + 16 * (unit ^ (row % 8)); }

// Where a lane points a load of four 8x8 matrices, 16 rows x 16 columns: `lane` is the offset in the first columns of a
// panel, and the next steps of 16 columns are an XOR away. Sums with uniform addresses and constants cost no instruction.
template <int ROWS>
__device__ __forceinline__ u32 step_offset(u32 lane, int step) {
    return (lane ^ (32 * (step % 4))) + step / 4 * ROWS * 128;
}

// Rows first_row.. of a matrix into a tile, a panel of WIDTH units (16 bytes) a row after another. What lies beyond `rows`
// or `columns` becomes 0, whatever memory holds there. ALL_ROWS says that none lies beyond `rows`.
template <class Config, int ROWS, int WIDTH, bool ALL_ROWS>
__device__ __forceinline__ void load_panel(u32 panel, const u16* matrix, i64 step, int first_row, int rows,
                                           int columns) {
    constexpr int PASS = Config::THREADS / WIDTH;  // rows that the block copies at a time
    static_assert(PASS % 8 == 0, "each thread keeps its place in the swizzle");
    constexpr int COPIES = ALL_ROWS ? (ROWS + PASS - 1) / PASS : 1;  // unrolled: the rare case keeps few registers
    const int unit = threadIdx.x % WIDTH;
    int row = first_row + threadIdx.x / WIDTH;
    u32 to = panel + unit_offset(threadIdx.x / WIDTH, unit);
    // A sum of integers: of pointers, the compiler would hold 8 * unit in two registers, which the loop needs.
    const u16* from = reinterpret_cast<const u16*>(reinterpret_cast<u64>(matrix + row * step) + 16 * unit);
#pragma unroll COPIES
    for (int i = 0; i < (ROWS + PASS - 1) / PASS; ++i, row += PASS, to += 128 * PASS, from += PASS * step) {
        if (ROWS % PASS != 0 && i * PASS + threadIdx.x / WIDTH >= ROWS) break;
        const bool inside = ALL_ROWS || row < rows;
        if (Config::ALIGNED) {
            copy_async(to, from, inside && 8 * unit < columns ? 16 : 0);
            continue;
        }
        u32 pairs[4];
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
            const u32 low = inside && 8 * unit + c < columns ? from[c] : 0;
            const u32 high = inside && 8 * unit + c + 1 < columns ? from[c + 1] : 0;
            pairs[c / 2] = low | high << 16;
        }
        store_unit(to, pairs);
    }
}

template <class Config, int ROWS, int COLUMNS, bool ALL_ROWS>
__device__ __forceinline__ void load_panels(u32 tile, const u16* matrix, i64 step, int first_row, int rows,
                                            int columns) {
    constexpr int PANELS = ALL_ROWS ? COLUMNS / 64 : 1;
#pragma unroll PANELS
    for (int panel = 0; panel < COLUMNS / 64; ++panel)
        load_panel<Config, ROWS, 8, ALL_ROWS>(tile + panel * ROWS * 128, matrix + 64 * panel, step, first_row, rows,
                                      columns - 64 * panel);
    if constexpr (COLUMNS % 64 != 0)
        load_panel<Config, ROWS, 4, ALL_ROWS>(tile + COLUMNS / 64 * ROWS * 128, matrix + COLUMNS / 64 * 64, step, first_row,
                                      rows, columns - COLUMNS / 64 * 64);
}

template <class Config, int ROWS, int COLUMNS>
__device__ __forceinline__ void load_tile(u32 tile, const u16* matrix, i64 step, int first_row, int rows, int columns) {
    if (Config::ALIGNED && first_row + ROWS <= rows)
        load_panels<Config, ROWS, COLUMNS, Config::ALIGNED>(tile, matrix, step, first_row, rows, columns);
    else
        load_panels<Config, ROWS, COLUMNS, false>(tile, matrix, step, first_row, rows, columns);
}

// Says that this thread's part of what has been loaded has come, or will say so when it has.
template <class Config>
__device__ __forceinline__ void arrive_loaded(u32 full) {
    if (Config::ALIGNED)
        barrier_arrive_with_copies(full);
    else
        barrier_arrive(full);
}

}  // namespace cuflash
