// Tiles of rows of Q, K or V, and how they come to shared memory while the block works on the one before.
//
// A tile has all rows that share a scale, so that no block waits for another: where it has 64 rows and K's are shared by
// columns, these are keys 0 to 3 or 4 to 7 of each 8 of 128. Recipes that share by 128 rows have tiles of 128.
#pragma once

#include "fp8/problem.cuh"

namespace cuflash {

constexpr int THREADS = CONFIG_THREADS;
constexpr int WARPS = THREADS / 32;

enum Role { QUERIES, KEYS, VALUES };

// 16 bytes after each row put what a warp reads at once, 16 bytes of each of 8 rows, into different banks.
struct Stage {
    unsigned char rows[TILE][2 * D + 16];
    float means[D];    // of K, also for Q, whose rows times these are lse_shifts; or of V
    float factors[D];  // of Q or K; or scales of V
};
static_assert(2 * sizeof(Stage) == CONFIG_SHARED_MEMORY, "the bytes in fp8/gpu_quantizer.py");

// What a tile is of.
struct Work {
    Role role;
    int tile;
    int end, length;                  // rows that are used, and that there are
    i64 head_of_all, kv_head_of_all;  // of (entries, heads), and of the keys that go with it
    const u16* rows;                  // the tile's first
    i64 step;                         // from row to row, in elements

    // Whether rows lie 4 by 4 of each 8.
    __device__ __forceinline__ bool spread(const Arguments& a) const {
        return TILE == 64 && role == KEYS && a.k_sharing == COLUMNS;
    }
    __device__ __forceinline__ int first_row(const Arguments& a) const {
        return spread(a) ? tile / 2 * 128 + tile % 2 * 4 : tile * TILE;
    }
    // How far from the first the row is that has this place in the tile.
    __device__ __forceinline__ int distance(int place, const Arguments& a) const {
        return spread(a) ? place + (place & ~3) : place;
    }
};

// Those that the statistics read last come first: some of their rows are in the L2 cache still.
__device__ __forceinline__ Work work_of(const Arguments& a, int index) {
    // Divisions of unsigned take half as long.
    const u32 q_tiles = (a.q_len + TILE - 1) / TILE, kv_tiles = a.key_blocks / (TILE / 64);
    const u32 of_queries = a.entries * a.q_heads * q_tiles, of_keys = a.entries * a.kv_heads * kv_tiles;
    u32 place = of_queries + 2 * of_keys - 1 - index;
    Work work;
    work.role = place < of_queries ? QUERIES : place < of_queries + of_keys ? KEYS : VALUES;
    place -= work.role == QUERIES ? 0 : work.role == KEYS ? of_queries : of_queries + of_keys;
    const u32 tiles = work.role == QUERIES ? q_tiles : kv_tiles, heads = work.role == QUERIES ? a.q_heads : a.kv_heads;
    const u32 head_of_all = place / tiles, entry = head_of_all / heads;
    work.tile = place - head_of_all * tiles, work.head_of_all = head_of_all;
    work.kv_head_of_all = work.role == QUERIES ? head_of_all / u32(a.group) : head_of_all;
    work.length = work.role == QUERIES ? a.q_len : a.kv_len;
    work.end = used(work.role == QUERIES ? a.q_lens : a.kv_lens, entry, work.length);
    const Input& from = work.role == QUERIES ? a.q : work.role == KEYS ? a.k : a.v;
    work.rows = row_of(from, entry, head_of_all - entry * heads, work.first_row(a)), work.step = from.row;
    return work;
}

// How many tiles there are.
__device__ __forceinline__ int tiles_of(const Arguments& a) {
    return a.entries * (a.q_heads * ((a.q_len + TILE - 1) / TILE) + a.kv_heads * a.key_blocks * (128 / TILE));
}

// Copies of a tile's rows begin; those past the end and channels past the dim are 0.
__device__ __forceinline__ void begin_rows(Stage& stage, const Work& work, const Arguments& a) {
    constexpr int ROWS_AT_ONCE = THREADS / UNITS;
    const int unit = threadIdx.x % UNITS, place = threadIdx.x / UNITS, first = work.distance(place, a);
    const int rows = unit * 8 < a.dim ? work.end - work.first_row(a) : 0;  // dims are multiples of 8
    const u16* at = work.rows + first * work.step + unit * 8;
    const int apart = work.distance(ROWS_AT_ONCE, a);  // a multiple of 4 where rows are spread
    const i64 step = apart * work.step;
    const u32 to = shared_address(&stage.rows[place][16 * unit]);
#pragma unroll
    for (int i = 0; i < TILE / ROWS_AT_ONCE; ++i, at += step)
        copy_async(to + i * ROWS_AT_ONCE * int(sizeof(stage.rows[0])), at, first + i * apart < rows ? 16 : 0);
}

// Copies of what the statistics say of its channels.
__device__ __forceinline__ void begin_factors(Stage& stage, const Work& work, const Arguments& a) {
    const i64 of_head = work.kv_head_of_all * D;
    const float* means = (work.role == VALUES ? a.v_means : a.k_means) + of_head;
    const float* factors = (work.role == VALUES ? a.v_scales : work.role == KEYS ? a.k_factors : a.q_factors) + of_head;
    const int place = threadIdx.x * 4;
    if (place < D)
        copy_async(shared_address(stage.means + place), means + place, 16);
    else if (place < 2 * D)
        copy_async(shared_address(stage.factors + place - D), factors + place - D, 16);
}

}  // namespace cuflash
