// A warpgroup's walk where each has 64 keys of its own, and dK and dV of them (Dao, FlashAttention-2, 2023, algorithm 2;
// Shah et al., FlashAttention-3, 2024, section 3.1).
#pragma once

#include "sm90_backward/warpgroup.cuh"

#if !CONFIG_PARTED
namespace cuflash {

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;

    __device__ __forceinline__ void begin_scores(Scores& scores) const {
        begin_products();
        multiply_rows<Config::D>(scores, k_lines(), low_word(q_tile(), 16));
        commit_products();
    }
    __device__ __forceinline__ void begin_weight_gradients(Scores& gradients) const {
        begin_products();
        multiply_rows<Config::DV>(gradients, v_lines(), low_word(o_tile(), 16));
        commit_products();
    }
    __device__ __forceinline__ void begin_values(ValueSums& dv, const Weights& weights) const {
        begin_products();
        multiply_by_queries(dv, weights, o_columns());
        commit_products();
    }
    // For both warpgroups' dQ.
    __device__ __forceinline__ void publish(const Weights& score_gradients) {
        store_transposed(scores(), score_gradients);
        fence_async();
        announce_dq();
    }

    // dS, with dV beside it. Row statistics are read ahead of products, which keep shared memory busy: EARLY ones, since
    // registers lack where some of 128 queries are hidden.
    template <typename Hidden>
    __device__ __forceinline__ void weights_of(Hidden, const Sight& sight, int tile, ValueSums& dv, Weights& score_gradients) {
        Scores scores, gradients;
        RowStats stats;
        Weights weights;
        constexpr bool HIDDEN = Hidden::value;
        constexpr int ALL = Config::BM / 2, EARLY = Config::BM == 128 && HIDDEN ? ALL / 2 : ALL;
        barrier_wait(q_full(), q_place.parity);
        barrier_wait(o_full(), o_place().parity);
        load_row_stats<0, EARLY / 2>(stats, lse());
        begin_scores(scores);
        begin_weight_gradients(gradients);
        wait_products<1>();
        const Seen seen(sight, tile);
        weigh<HIDDEN, 0, EARLY>(scores, stats, seen, a);
        load_row_stats<EARLY / 2, ALL / 2>(stats, lse());
        weigh<HIDDEN, EARLY, ALL>(scores, stats, seen, a);
        load_row_stats<0, EARLY / 2>(stats, delta());
        wait_products<0>();
        differentiate<0, EARLY>(gradients, scores, stats);
        load_row_stats<EARLY / 2, ALL / 2>(stats, delta());
        differentiate<EARLY, ALL>(gradients, scores, stats);
        pack_scores(score_gradients, gradients);
        publish(score_gradients);
        pack_scores(weights, scores);
        begin_values(dv, weights);
    }

    template <typename Hidden>
    __device__ __forceinline__ void step(Hidden hidden, const Sight& sight, int tile, KeySums& dk, ValueSums& dv) {
        Weights score_gradients;
        QuerySums dq;
        weights_of(hidden, sight, tile, dv, score_gradients);
        meet(SCORES, THREADS);
        begin_products();
        multiply_by_keys(dq, scores_words(), k_columns());
        commit_products();
        wait_products<1>();
        release(o_empty());
        begin_products();
        multiply_by_queries(dk, score_gradients, q_columns());
        commit_products();
        wait_products<1>();
        hand_over_dq(dq);
        wait_products<0>();
        barrier_arrive(q_empty());
        next_tile();
    }

    __device__ __forceinline__ void run() {
        Work work;
        bool more = works.next(work, base);
        while (more) {
            KeySums dk;
            ValueSums dv;
            clear(dk), clear(dv);
            await_keys_and_values();
            if (work.begin < work.end) {
                clear_dead_keys(work);
                walk(work, [&](auto hidden, const Sight& sight, int tile) { step(hidden, sight, tile, dk, dv); });
            }
            leave_keys_and_values();
            round(dv, 1.f, staged_values());
            round(dk, a.scale, staged_keys());
            fence_async();
            works.read(work, base);
            works.release(base);
            meet(ONE + group, 128);
            if (is_leader()) {
                store<Config::DV>(a.dv, staged_values(), work);
                store<Config::D>(a.dk, staged_keys(), work);
                commit_stores();
            }
            more = works.next(work, base);  // here: asked for in the condition, it takes registers
        }
        if (is_leader()) wait_stores();
    }
};

}  // namespace cuflash
#endif
