// A warpgroup's walk where each has 64 keys of its own, and dK and dV of them (Dao, FlashAttention-2, 2023, algorithm 2;
// Shah et al., FlashAttention-3, 2024, section 3.1).
//
// dQ takes dS of both. LATE, it is multiplied one tile later, when the other's has long been there, so that neither waits:
// they come to be up to a tile apart, and what one does between its products is done beside those of the other. In turn,
// other blocks would wait for it.
#pragma once

#include "sm90_backward/warpgroup.cuh"

#if !CONFIG_PARTED
namespace cuflash {

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;
    static constexpr bool LATE = !Config::ORDERED;
    // Tests of barriers ahead of waits for them pay where tiles are short.
    static constexpr bool TESTED = Config::BM == 64;

    u32 ready = 0;  // whether Q and dO of the next tile were seen to be there

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
    // dS for both warpgroups' dQ, once the other has multiplied what was in its place.
    __device__ __forceinline__ void publish(const Weights& score_gradients) {
        if (LATE) meet(EMPTY + 2 * q_place.slot + group, THREADS);
        store_transposed(scores(q_place.slot), score_gradients);
        fence_async();
        announce_dq();
        if (LATE) announce(FULL + 2 * q_place.slot + other(), THREADS);
    }
    __device__ __forceinline__ int other() const { return group ^ 1; }
    __device__ __forceinline__ int dq_slot() const { return q_place.slot ^ (LATE ? 1 : 0); }
    __device__ __forceinline__ void begin_dq(QuerySums& dq) const {
        if (LATE)
            meet(FULL + 2 * dq_slot() + group, THREADS);
        else
            meet(ALL, THREADS);
        begin_products();
        multiply_by_keys(dq, scores_words(dq_slot()), k_columns());
        commit_products();
    }
    __device__ __forceinline__ void end_dq(const QuerySums& dq) {
        if (LATE) announce(EMPTY + 2 * dq_slot() + other(), THREADS);
        hand_over_dq(dq);
    }
    __device__ __forceinline__ void add_last_dq() {
        QuerySums dq;
        fence_async();
        announce_dq();
        begin_dq(dq);
        wait_products<0>();
        end_dq(dq);
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
        barrier_wait_unless(ready, q_full(), q_place.parity);
        barrier_wait_unless(ready, o_full(), o_place().parity);
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

    __device__ __forceinline__ void begin_keys(KeySums& dk, const Weights& score_gradients) const {
        begin_products();
        multiply_by_queries(dk, score_gradients, q_columns());
        commit_products();
    }
    __device__ __forceinline__ void end_step() {
        const u32 released = q_empty();
        next_tile();
        if (TESTED) ready = barrier_test(q_full(), q_place.parity) & barrier_test(o_full(), o_place().parity);
        wait_products<0>();
        barrier_arrive(released);
    }
    // The first of a piece of work, before which there is none.
    template <typename Hidden>
    __device__ __forceinline__ void first_step(Hidden hidden, const Sight& sight, int tile, KeySums& dk, ValueSums& dv) {
        Weights score_gradients;
        weights_of(hidden, sight, tile, dv, score_gradients);
        begin_keys(dk, score_gradients);
        wait_products<1>();
        release(o_empty());
        end_step();
    }
    template <typename Hidden>
    __device__ __forceinline__ void step(Hidden hidden, const Sight& sight, int tile, KeySums& dk, ValueSums& dv) {
        Weights score_gradients;
        QuerySums dq;
        weights_of(hidden, sight, tile, dv, score_gradients);
        begin_dq(dq);
        wait_products<1>();
        release(o_empty());
        begin_keys(dk, score_gradients);
        wait_products<1>();
        end_dq(dq);
        end_step();
    }
    __device__ __forceinline__ void walk_tiles(Work& work, KeySums& dk, ValueSums& dv) {
        auto begin = [&](int of_group, int& tile) {
            if (!LATE || of_group > 0) return;
            if (work.is_clean(tile))
                first_step(False(), Sight(), tile, dk, dv);
            else
                first_step(True(), Sight(work, line(), a), tile, dk, dv);
            --tile;
        };
        walk(work, begin, [&](auto hidden, const Sight& sight, int tile) { step(hidden, sight, tile, dk, dv); });
        if (LATE) add_last_dq();
    }

    __device__ __forceinline__ void run() {
        Work work;
        for (int slot = 0; LATE && slot < 2; ++slot) announce(EMPTY + 2 * slot + other(), THREADS);
        bool more = works.next(work, base);
        while (more) {
            KeySums dk;
            ValueSums dv;
            clear(dk), clear(dv);
            await_keys_and_values();
            if (work.begin < work.end) {
                clear_dead_keys(work);
                walk_tiles(work, dk, dv);
            }
            leave_keys_and_values();
            works.read(work, base);
            works.release(base);
            if (work.split < 0 || join_parts(work, dk, dv)) {
                round(dv, 1.f, staged_values());
                round(dk, a.scale, staged_keys());
                fence_async();
                meet(ONE + group, 128);
                if (is_leader()) {
                    store<Config::DV>(a.dv, staged_values(), work);
                    store<Config::D>(a.dk, staged_keys(), work);
                    commit_stores();
                }
            }
            more = works.next(work, base);  // here: asked for in the condition, it takes registers
        }
        if (is_leader()) wait_stores();
    }
};

}  // namespace cuflash
#endif
