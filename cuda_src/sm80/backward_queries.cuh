// dQ by itself, of a tile of queries, for the same bits run after run: what the main kernel would add up in any order, a block
// sums up in that of the keys. Weights are computed once more; a warp owns whole rows, and its dS stays in registers.
#pragma once

#include "sm80/backward_scores.cuh"
#include "sm80/gradients.cuh"

namespace cuflash {

struct QueryConfig {
    static constexpr int WARPS = CONFIG_DQ_WARPS;
    static constexpr int BN = CONFIG_DQ_KEYS;
    static constexpr int BLOCKS = Config::D + Config::DV > 384 ? 1 : 2;  // of one multiprocessor
    static constexpr int THREADS = 32 * WARPS;
    static constexpr bool ALIGNED = Config::ALIGNED;
    static constexpr int QUERIES = Config::M / WARPS;  // of a warp
};
static_assert(QueryConfig::QUERIES % 16 == 0 && QueryConfig::BN % 16 == 0, "whole products");

typedef Sums<QueryConfig::QUERIES / 16, QueryConfig::BN / 16> RowScores;  // queries as rows, keys as columns

// What a block works on; under a causal mask blocks with the most keys come first.
struct QueryWork {
    int head_of_all, entry, head, first_row;
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // key tiles that some row sees
    int clean_begin, clean_end;  // of those, the ones that all rows see whole

    __device__ __forceinline__ void find(const Arguments& a) {
        head_of_all = blockIdx.x / a.row_blocks;
        entry = head_of_all / a.q_heads, head = head_of_all % a.q_heads;
        first_row = (a.row_blocks - 1 - int(blockIdx.x % a.row_blocks)) * Config::M;
        q_len = used_length(a.q_lens, entry, a.q_len);
        kv_len = used_length(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;
        find_tiles(a.left, a.right);
    }

    __device__ __forceinline__ void find_tiles(int left, int right) {
        constexpr int BN = QueryConfig::BN;
        begin = clean_begin = 0;
        end = (kv_len + BN - 1) / BN;
        clean_end = kv_len / BN;
        if (Config::BOUNDED) {
            const int first_key = first_row + diagonal, last_row = min(first_row + Config::M, q_len) - 1;
            begin = max(0, first_key - left) / BN;
            end = min(end, (max(0, last_row + diagonal + right + 1) + BN - 1) / BN);
            clean_begin = (max(0, first_key + Config::M - 1 - left) + BN - 1) / BN;
            clean_end = min(clean_end, max(0, first_key + right + 1) / BN);
        }
        if (first_row + Config::M > q_len) clean_end = 0;
        if (first_row >= q_len || end < begin) end = begin;
    }
};

// A left operand in registers: what sums of a product before were rounded to.
struct RoundedScores {
    u32 of[RowScores::ROW_TILES][QueryConfig::BN / 16][4];

    __device__ __forceinline__ explicit RoundedScores(const RowScores& scores) {
#pragma unroll
        for (int r = 0; r < RowScores::ROW_TILES; ++r)
#pragma unroll
            for (int step = 0; step < QueryConfig::BN / 16; ++step)
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const float* pair = &scores.of[r][2 * step + part / 2][2 * (part % 2)];
                    of[r][step][part] = pack(pair[0], pair[1], Config::Element());
                }
    }
    __device__ __forceinline__ void load(u32 (&to)[4], int tile, int step) const {
#pragma unroll
        for (int part = 0; part < 4; ++part) to[part] = of[tile][step][part];
    }
};

__device__ __forceinline__ void hide_keys(RowScores& scores, int first_key, int first_row, const Visible& visible) {
    const int lane = threadIdx.x % 32, lane_key = first_key + 2 * (lane % 4);
#pragma unroll
    for (int r = 0; r < RowScores::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = first_row + 16 * r + 8 * half + lane / 4;
            const int low = visible.first(query) - lane_key, high = visible.last(query) - lane_key;
#pragma unroll
            for (int n = 0; n < RowScores::COLUMN_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < low || 8 * n + e > high) scores.of[r][n][2 * half + e] = minus_infinity();
        }
}

// The lane's rows.
struct LaneRows {
    Row of[RowScores::ROW_TILES][2];

    __device__ __forceinline__ explicit LaneRows(const Row* rows) {
#pragma unroll
        for (int r = 0; r < RowScores::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) of[r][half] = rows[16 * r + 8 * half + threadIdx.x % 32 / 4];
    }
};

// Scores, and what comes of their weights, to dS.
template <bool HIDDEN>
__device__ __forceinline__ void differentiate_rows(RowScores& scores, const RowScores& by_weight, const LaneRows& rows,
                                                   float factor) {
#pragma unroll
    for (int r = 0; r < RowScores::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < RowScores::COLUMN_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& score = scores.of[r][n][e];
                const Row& row = rows.of[r][e / 2];
                weigh<HIDDEN>(score, factor, row.lse);
                score = differentiate<HIDDEN>(score, by_weight.of[r][n][e], row.delta);
            }
}

__device__ __forceinline__ void go_through_queries(const Arguments& a) {
    constexpr int BN = QueryConfig::BN, M = Config::M;
    const u32 q_tile = dynamic_shared(), dout_tile = q_tile + Tile<M, Config::D>::BYTES;
    const u32 k_tile = dout_tile + Tile<M, Config::DV>::BYTES, v_tile = k_tile + Tile<BN, Config::D>::BYTES;

    // Phases count key tiles, as in the forward kernel.
    __shared__ u64 barriers[4];
    const u32 k_full = shared_address(barriers), v_full = k_full + 8, k_free = k_full + 16, v_free = k_full + 24;
    if (threadIdx.x == 0) {
        barrier_init(k_full, QueryConfig::THREADS), barrier_init(v_full, QueryConfig::THREADS);
        barrier_init(k_free, QueryConfig::THREADS), barrier_init(v_free, QueryConfig::THREADS);
    }
    QueryWork work;
    work.find(a);
    const int kv_head = work.head / a.group;
    const u16* k = a.k + work.entry * a.k_entry + kv_head * a.k_head;
    const u16* v = a.v + work.entry * a.v_entry + kv_head * a.v_head;
    int tile = work.begin;
    bool more = tile < work.end;
    __syncthreads();  // the barriers have been written
    if (more) {
        load_tile<QueryConfig, M, Config::D>(q_tile, a.q + work.entry * a.q_entry + work.head * a.q_head, a.q_row,
                                             work.first_row, work.q_len, a.head_dim);
        load_tile<QueryConfig, BN, Config::D>(k_tile, k, a.k_row, tile * BN, work.kv_len, a.head_dim);
        arrive_loaded<QueryConfig>(k_full);
        load_tile<QueryConfig, M, Config::DV>(dout_tile, a.dout + work.entry * a.dout_entry + work.head * a.dout_head,
                                              a.dout_row, work.first_row, work.q_len, a.head_dim_v);
        load_tile<QueryConfig, BN, Config::DV>(v_tile, v, a.v_row, tile * BN, work.kv_len, a.head_dim_v);
        arrive_loaded<QueryConfig>(v_full);
    }
    typedef Config::Element Element;
    const int first_row = threadIdx.x / 32 * QueryConfig::QUERIES;  // of the warp, in the tile
    const Row* all_rows = a.rows + (i64(work.head_of_all) * a.row_blocks * M + work.first_row);
    const LaneRows rows(all_rows + first_row);
    Sums<QueryConfig::QUERIES / 16, Config::D / 16> dq;
    dq.clear();

    for (u32 parity = 0; more; ++tile, parity ^= 1) {
        more = tile + 1 < work.end;
        const bool clean = tile >= work.clean_begin && tile < work.clean_end;
        barrier_wait(k_full, parity);
        RowScores scores;
        scores.clear();
        multiply_tiles<Element, Config::D / 16, Config::UNROLL>(scores, left_by_rows<M>(q_tile, first_row),
                                                right_by_rows<BN>(k_tile, 0));
        barrier_wait(v_full, parity);
        RowScores by_weight;
        by_weight.clear();
        multiply_tiles<Element, Config::DV / 16, Config::UNROLL>(by_weight, left_by_rows<M>(dout_tile, first_row),
                                                 right_by_rows<BN>(v_tile, 0));
        barrier_arrive(v_free);
        if (Config::SOFTCAP || a.prepare) prepare_scores(scores, a.premultiply);
        if (clean) {
            differentiate_rows<false>(scores, by_weight, rows, a.factor);
        } else {
            const Visible visible = {work.diagonal, a.left, a.right, work.q_len, work.kv_len};
            hide_keys(scores, tile * BN, work.first_row + first_row, visible);
            differentiate_rows<true>(scores, by_weight, rows, a.factor);
        }
        const RoundedScores by_score(scores);
        if (more) {
            barrier_wait(v_free, parity);
            load_tile<QueryConfig, BN, Config::DV>(v_tile, v, a.v_row, (tile + 1) * BN, work.kv_len, a.head_dim_v);
            arrive_loaded<QueryConfig>(v_full);
        }
        multiply_tiles<Element, BN / 16, BN / 16>(dq, by_score, right_by_columns<BN, 1>(k_tile, 0));
        barrier_arrive(k_free);
        if (more) {
            barrier_wait(k_free, parity);
            load_tile<QueryConfig, BN, Config::D>(k_tile, k, a.k_row, (tile + 1) * BN, work.kv_len, a.head_dim);
            arrive_loaded<QueryConfig>(k_full);
        }
    }

    __syncthreads();  // no warp reads Q any more
    put_sums<Element, M, 1, 1>(q_tile, dq, first_row, 0, a.scale,
                               [&](int row) { return all_rows[row].lse != infinity(); });
    __syncthreads();
    u16* to = a.dq + work.entry * a.dq_entry + work.head * a.dq_head + work.first_row * a.dq_row;
    store_tile<M, Config::D, QueryConfig::THREADS>(q_tile, to, a.dq_row, a.q_len - work.first_row, a.head_dim, a.dq_aligned);
}

}  // namespace cuflash
