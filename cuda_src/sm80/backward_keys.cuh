// The main kernel of the backward pass: dK and dV of a tile of keys, and its part of dQ.
#pragma once

#include "sm80/backward_scores.cuh"
#include "sm80/backward_work.cuh"
#include "sm80/gradients.cuh"

namespace cuflash {

struct SharedMemory {
    static constexpr int K = 0;
    static constexpr int V = K + Tile<Config::BN, Config::D>::BYTES;
    static constexpr int DOUT = V + Tile<Config::BN, Config::DV>::BYTES;
    static constexpr int WEIGHTS = DOUT + Tile<Config::M, Config::DV>::BYTES;
    static constexpr int BY_SCORES = WEIGHTS + Tile<Config::BN, Config::M>::BYTES;
    static constexpr int Q = BY_SCORES + Tile<Config::BN, Config::M>::BYTES;  // STAGES of them
    static constexpr int Q_BYTES = Tile<Config::M, Config::D>::BYTES;
    static constexpr int ROWS = Q + Config::STAGES * Q_BYTES;  // STAGES of them
    static constexpr int ROWS_BYTES = Config::M * sizeof(Row);
};

__device__ __forceinline__ void load_queries(const Arguments& a, const KeyWork& work, const QueryTile& at, u32 shared,
                                             int stage) {
    load_tile<Config, Config::M, Config::D>(shared + SharedMemory::Q + stage * SharedMemory::Q_BYTES,
                                            work.q + at.head * a.q_head, a.q_row, at.tile * Config::M, work.q_len,
                                            a.head_dim);
    const Row* rows = work.rows + (i64(at.head) * a.row_blocks + at.tile) * Config::M;
    constexpr int UNITS = SharedMemory::ROWS_BYTES / 16;
    static_assert(UNITS <= Config::THREADS, "one a thread");
    const int unit = threadIdx.x;
    if (unit >= UNITS) return;
    const u32 to = shared + SharedMemory::ROWS + stage * SharedMemory::ROWS_BYTES + 16 * unit;
    const uint4* from = reinterpret_cast<const uint4*>(rows) + unit;
    if (Config::ALIGNED) {
        copy_async(to, from, 16);
    } else {  // arrives with what the thread itself has stored
        const uint4 x = *from;
        const u32 words[4] = {x.x, x.y, x.z, x.w};
        store_unit(to, words);
    }
}

__device__ __forceinline__ void load_dout(const Arguments& a, const KeyWork& work, const QueryTile& at, u32 shared) {
    load_tile<Config, Config::M, Config::DV>(shared + SharedMemory::DOUT, work.dout + at.head * a.dout_head, a.dout_row,
                                             at.tile * Config::M, work.q_len, a.head_dim_v);
}

__device__ __forceinline__ void go_through_keys(const Arguments& a) {
    const u32 shared = dynamic_shared();

    // Phases count query tiles. Full: every thread's part of a tile has come. Free: every thread has read dO; taken: it has
    // read Q, P and dS too.
    __shared__ u64 barriers[4];
    const u32 q_full = shared_address(barriers), dout_full = q_full + 8, dout_free = q_full + 16, taken = q_full + 24;
    if (threadIdx.x == 0) {
        barrier_init(q_full, Config::THREADS), barrier_init(dout_full, Config::THREADS);
        barrier_init(dout_free, Config::THREADS), barrier_init(taken, Config::THREADS);
    }
    __shared__ KeyWork work;  // the loop has no registers to spare
    if (threadIdx.x == 0) work.find(a);
    __syncthreads();  // the barriers and work have been written

    QueryTile at = QueryTile::first(work);
    int left = (work.end - work.begin) * a.group;
    if (left > 0) {
        const int kv_head = work.kv_head;
        load_tile<Config, Config::BN, Config::D>(shared + SharedMemory::K,
                                                 a.k + work.entry * a.k_entry + kv_head * a.k_head, a.k_row,
                                                 work.first_key, work.kv_len, a.head_dim);
        load_queries(a, work, at, shared, 0);
        arrive_loaded<Config>(q_full);
        load_tile<Config, Config::BN, Config::DV>(shared + SharedMemory::V,
                                                  a.v + work.entry * a.v_entry + kv_head * a.v_head, a.v_row,
                                                  work.first_key, work.kv_len, a.head_dim_v);
        load_dout(a, work, at, shared);
        arrive_loaded<Config>(dout_full);
    }

    typedef Config::Element Element;
    constexpr int BN = Config::BN, M = Config::M, SIDES = Config::SIDES;
    const int warp = threadIdx.x / 32;
    const int first_key = warp / SIDES * Config::KEYS, side = warp % SIDES;
    const int first_query = side * Config::QUERIES;
    Sums<Config::KEYS / 16, Config::D / (16 * SIDES)> dk;
    Sums<Config::KEYS / 16, Config::DV / (16 * SIDES)> dv;
    dk.clear(), dv.clear();

    WarpTurn turn;
    for (u32 parity = 0; left > 0; --left, parity ^= 1) {
        const int stage = Config::STAGES == 2 ? parity : 0;
        const u32 q_tile = shared + SharedMemory::Q + stage * SharedMemory::Q_BYTES;
        const u32 rows = shared + SharedMemory::ROWS + stage * SharedMemory::ROWS_BYTES + first_query * sizeof(Row);
        const QueryTile next = at.next(work, a);
        const bool clean = at.tile >= work.clean_begin && at.tile < work.clean_end;

        barrier_wait(q_full, parity);
        Scores scores;
        scores.clear();
        multiply_tiles<Element, Config::D / 16, Config::UNROLL>(scores, left_by_rows<BN>(shared + SharedMemory::K, first_key),
                                                right_by_rows<M>(q_tile, first_query));
        if (Config::DETERMINISTIC) turn.pass(a.counters);  // of the tile before: what it added is there by now
        barrier_wait(taken, parity ^ 1);  // of the tile before
        if (Config::STAGES == 2 && left > 1) {
            load_queries(a, work, next, shared, stage ^ 1);
            arrive_loaded<Config>(q_full);
        }
        if (Config::SOFTCAP || a.prepare) prepare_scores(scores, a.premultiply);
        const Kept weights(shared + SharedMemory::WEIGHTS, first_key, first_query);
        if (clean) {
            weigh_scores<false>(scores, rows, a.factor, weights);
        } else {
            const Visible visible = {work.diagonal, a.left, a.right, work.q_len, work.kv_len};
            hide_pairs(scores, work.first_key + first_key, at.tile * M + first_query, visible);
            weigh_scores<true>(scores, rows, a.factor, weights);
        }

        barrier_wait(dout_full, parity);
        Scores by_weight;
        by_weight.clear();
        multiply_tiles<Element, Config::DV / 16, Config::UNROLL>(
            by_weight, left_by_rows<BN>(shared + SharedMemory::V, first_key),
            right_by_rows<M>(shared + SharedMemory::DOUT, first_query));
        const Kept by_scores(shared + SharedMemory::BY_SCORES, first_key, first_query);
        if (clean)
            differentiate_scores<false>(scores, by_weight, rows, by_scores);
        else
            differentiate_scores<true>(scores, by_weight, rows, by_scores);
        __syncthreads();  // all of P and dS is there

        multiply_tiles<Element, M / 16, M / 16>(dv, left_by_rows<BN>(shared + SharedMemory::WEIGHTS, first_key),
                                                right_by_columns<M, SIDES>(shared + SharedMemory::DOUT, side));
        barrier_arrive(dout_free);
        multiply_tiles<Element, M / 16, M / 16>(dk, left_by_rows<BN>(shared + SharedMemory::BY_SCORES, first_key),
                                                right_by_columns<M, SIDES>(q_tile, side));
        if (left > 1) {
            barrier_wait(dout_free, parity);
            load_dout(a, work, next, shared);
            arrive_loaded<Config>(dout_full);
        }
        if (Config::DETERMINISTIC) turn.look(a.counters, at.counter(work, a));
        QuerySums dq;
        dq.clear();
        multiply_tiles<Element, BN / 16, BN / 16>(
            dq, left_by_columns<BN, Config::QUERY_GROUPS>(shared + SharedMemory::BY_SCORES, warp / Config::DQ_SIDES),
            right_by_columns<BN, Config::DQ_SIDES>(shared + SharedMemory::K, warp % Config::DQ_SIDES));
        barrier_arrive(taken);
        if (Config::STAGES == 1 && left > 1) {
            barrier_wait(taken, parity);
            load_queries(a, work, next, shared, 0);
            arrive_loaded<Config>(q_full);
        }
        if (Config::DETERMINISTIC) turn.await(a.counters, at.turn(work, a));
        float* sums = work.sums + (i64(at.head) * a.row_blocks + at.tile) * (M * Config::D) + warp * QuerySums::FLOATS;
#pragma unroll
        for (int r = 0; r < QuerySums::ROW_TILES; ++r)
#pragma unroll
            for (int n = 0; n < QuerySums::COLUMN_TILES; ++n)
                add_to_global(sums + (r * QuerySums::COLUMN_TILES + n) * 128, dq.of[r][n]);
        at = next;
    }

    if (Config::DETERMINISTIC) turn.pass(a.counters);

    // Keys past the length have seen zeros; what their sums are does not matter.
    __syncthreads();  // no warp reads K or V any more
    const int used = work.kv_len - work.first_key;
    const auto is_used = [&](int key) { return key < used; };
    put_sums<Element, BN, 1, SIDES>(shared + SharedMemory::K, dk, first_key, side, a.scale, is_used);
    put_sums<Element, BN, 1, SIDES>(shared + SharedMemory::V, dv, first_key, side, SHIFT_BACK, is_used);
    __syncthreads();
    const int key = work.first_key, capacity = a.kv_len - key;
    store_tile<BN, Config::D, Config::THREADS>(shared + SharedMemory::K,
                                               a.dk + work.entry * a.dk_entry + work.kv_head * a.dk_head + key * a.dk_row,
                                               a.dk_row, capacity, a.head_dim, a.dk_aligned);
    store_tile<BN, Config::DV, Config::THREADS>(shared + SharedMemory::V,
                                                a.dv + work.entry * a.dv_entry + work.kv_head * a.dv_head + key * a.dv_row,
                                                a.dv_row, capacity, a.head_dim_v, a.dv_aligned);
}

}  // namespace cuflash
