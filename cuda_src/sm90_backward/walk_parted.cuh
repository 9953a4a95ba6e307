// Two warpgroups' walk on the same 64 keys, where registers lack for both dK and dV: the first makes weights and dV of them,
// the second their gradients and dK; each half of dQ. Weights go from one to the other through shared memory, in float32.
#pragma once

#include "sm90_backward/warpgroup.cuh"

#if CONFIG_PARTED
namespace cuflash {

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;

    // Barriers of what one hands to the other have a phase for each tile, of which `q_place` has the parity: it has two
    // slots. As a thread of either warpgroup holds them: both have the same keys and queries.
    __device__ __forceinline__ u32 weights_at() const { return base + Shared::weights + own_unit; }

    // Of scores that are capped, what goes with the gradients of weights has the slope in it.
    template <bool HIDDEN>
    __device__ __forceinline__ void hand_over_weights(const Sight& sight, int tile, Weights& weights) {
        Scores scores;
        RowStats stats;
        barrier_wait(q_full(), q_place.parity);
        load_row_stats(stats, lse());
        begin_products();
        multiply_rows<Config::D>(scores, k_lines(), low_word(q_tile(), 16));
        commit_products();
        wait_products<0>();
        barrier_arrive(q_empty());
        const Seen seen(sight, tile);
        if (Config::CAPPED) {
            weigh_capped<HIDDEN>(weights, scores, stats, seen, a);
        } else {
            weigh<HIDDEN, 0, Config::BM / 2>(scores, stats, seen, a);
            pack_scores(weights, scores);
        }
        barrier_wait(base + Shared::weights_empty, q_place.slot ^ 1);
#pragma unroll
        for (int i = 0; i < Config::BM / 2; i += 4)
            store_floats(weights_at() + 512 * i, scores[i], scores[i + 1], scores[i + 2], scores[i + 3]);
        fence_async();
        announce_dq();
        barrier_arrive(base + Shared::weights_full);
    }

    // All chunks of a share of dQ but the last are fenced and announced at once.
    __device__ __forceinline__ void begin_chunk(QuerySums& dq, int chunk) const {
        begin_products();
        multiply_by_keys(dq, scores_words(q_place.slot), k_columns(chunk));
        commit_products();
    }
    __device__ __forceinline__ void hand_over_chunk(const QuerySums& dq, int chunk) {
        hand_over_dq(dq);
        if (Config::ORDERED || chunk == Config::DQ_CHUNKS - 1) return;
        fence_async();
        announce_dq();
    }

    template <bool HIDDEN>
    __device__ __forceinline__ void step_of_values(const Sight& sight, int tile, ValueSums& dv) {
        Weights weights;
        QuerySums dq;
        hand_over_weights<HIDDEN>(sight, tile, weights);
        barrier_wait(o_full(), o_place().parity);
        begin_products();
        multiply_by_queries(dv, weights, o_columns());
        commit_products();
        barrier_wait(base + Shared::scores_full, q_place.slot);
#pragma unroll
        for (int chunk = 0; chunk < Config::DQ_CHUNKS; ++chunk) {
            begin_chunk(dq, chunk);
            if (chunk == 0) {
                wait_products<1>();
                release(o_empty());
            }
            wait_products<0>();
            hand_over_chunk(dq, chunk);
        }
        next_tile();
    }

    // dS, where all warpgroups find it.
    __device__ __forceinline__ void publish_score_gradients(Weights& score_gradients) {
        Scores gradients, weights;
        RowStats stats;
        barrier_wait(q_full(), q_place.parity);
        barrier_wait(o_full(), o_place().parity);
        load_row_stats(stats, delta());
        begin_products();
        multiply_rows<Config::DV>(gradients, v_lines(), low_word(o_tile(), 16));
        commit_products();
        wait_products<0>();
        release(o_empty());
        barrier_wait(base + Shared::weights_full, q_place.slot);
#pragma unroll
        for (int i = 0; i < Config::BM / 2; i += 4)
            load_floats(weights[i], weights[i + 1], weights[i + 2], weights[i + 3], weights_at() + 512 * i);
        differentiate<0, Config::BM / 2>(gradients, weights, stats);
        barrier_arrive(base + Shared::weights_empty);
        pack_scores(score_gradients, gradients);
        store_transposed(scores(q_place.slot), score_gradients);
        fence_async();
        announce_dq();
        barrier_arrive(base + Shared::scores_full);
        barrier_wait(base + Shared::scores_full, q_place.slot);
    }

    __device__ __forceinline__ void step_of_keys(KeySums& dk) {
        Weights score_gradients;
        QuerySums dq;
        publish_score_gradients(score_gradients);
        begin_chunk(dq, 0);
        begin_products();
        multiply_by_queries(dk, score_gradients, q_columns());
        commit_products();
        wait_products<1>();
        hand_over_chunk(dq, 0);
#pragma unroll
        for (int chunk = 1; chunk < Config::DQ_CHUNKS; ++chunk) {
            begin_chunk(dq, chunk);
            wait_products<0>();
            hand_over_chunk(dq, chunk);
        }
        wait_products<0>();
        barrier_arrive(q_empty());
        next_tile();
    }

    template <int COUNT, typename Step>
    __device__ __forceinline__ void run(const TensorMap& map, u32 to, float factor, Step step) {
        Work work;
        bool more = works.next(work, base);
        while (more) {
            float sums[COUNT];
            clear(sums);
            await_keys_and_values();
            if (work.begin < work.end) {
                clear_dead_keys(work);
                walk(work, [](int, int&) {}, [&](auto hidden, const Sight& sight, int tile) { step(hidden, sight, tile, sums); });
            }
            leave_keys_and_values();
            works.read(work, base);
            works.release(base);
            if (work.split < 0 || join_parts(work, sums)) {
                round(sums, factor, to);
                fence_async();
                meet(ONE + group, 128);
                if (is_leader()) {
                    store<2 * COUNT>(map, to, work);
                    commit_stores();
                }
            }
            more = works.next(work, base);  // here: asked for in the condition, it takes registers
        }
        if (is_leader()) wait_stores();
    }

    __device__ __forceinline__ void run() {
        if (group == 0) {
            run<Config::DV / 2>(a.dv, staged_values(), 1.f, [&](auto hidden, const Sight& sight, int tile, ValueSums& dv) {
                step_of_values<decltype(hidden)::value>(sight, tile, dv);
            });
        } else {
            run<Config::D / 2>(a.dk, staged_keys(), a.scale,
                               [&](auto, const Sight&, int, KeySums& dk) { step_of_keys(dk); });
        }
    }
};

}  // namespace cuflash
#endif
