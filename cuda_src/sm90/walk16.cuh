// A warpgroup's walk over key tiles of 16 bits: the weights and values of one tile are multiplied beside the softmax of the
// next (Shah et al., FlashAttention-3, 2024, section 3.2).
#pragma once

#include "sm90/warpgroup.cuh"

#if CONFIG_BITS == 16
namespace cuflash {

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;

    // Rows of V past the used keys become 0: a weight of 0 times what memory holds there might be NaN.
    __device__ __forceinline__ void clear_values(int first_dead_row) const {
        constexpr int UNITS = Config::V_ROW / 16;
        const u32 zeros[4] = {0, 0, 0, 0};
        const int rows = Config::BN - first_dead_row;
        for (int i = threadIdx.x - 128; i < rows * UNITS * (Config::DV / Config::V_PANEL); i += 128 * Config::GROUPS) {
            const int unit = i % UNITS, row = i / UNITS % rows, panel = i / UNITS / rows;
            store_unit(base + Shared::v + place.slot * Shared::V_STAGE +
                           (panel * Config::BN + first_dead_row + row) * Config::V_ROW + 16 * unit,
                       zeros);
        }
        fence_async();
        meet(CONSUMERS, 128 * Config::GROUPS);
    }

    // Weights of a tile, where nothing goes on beside it.
    template <bool FIRST>
    __device__ __forceinline__ void begin(int tile, bool hidden, const Sight& sight, const Span& span, Weights& weights,
                                          Rows& rows) const {
        Scores scores;
        barrier_wait(k_full(), place.parity);
        begin_products();
        multiply_queries_and_keys(scores, q_words(), k_words());
        commit_products();
        if (FIRST && !VALUES_FIRST) tell_out_gone();
        wait_products<0>();
        release(k_empty());
        release_queries_after(tile, span);
        prepare_scores(scores, a.premultiply);
        if (hidden) hide(scores, sight.from(tile * Config::BN, a));
        weigh<FIRST>(scores, rows, a);
        pack_weights(weights, scores);
    }

    // Rows past the used keys of the first tile.
    __device__ __forceinline__ void clear_dead_values(const Work& work) const {
        if (Config::LENGTHS && work.kv_len < a.kv_len && work.kv_len < work.end * Config::BN) {
            barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
            clear_values(work.kv_len - (work.end - 1) * Config::BN);
        }
    }

    // Products of a turn: scores of a tile, and values of the one before, which come in this order.
    __device__ __forceinline__ void multiply_both(Scores& scores, Out& out,
                                                  Weights& weights, const Rows& rows,
                                                  const Place<Config::STAGES>& before) const {
        if (!Config::PING_PONG || group == 0) barrier_wait(k_full(), place.parity);  // the others' turn comes later
        await_turn();
        begin_products();
        multiply_queries_and_keys(scores, q_words(), k_words());
        commit_products();
        if (Config::DV > 128) scale_out(out, rows);
        if (!Config::PING_PONG || group == 0) barrier_wait(base + Shared::v_full + 8 * before.slot, before.parity);
        begin_products();
        multiply_weights_and_values(out, weights, v_words(before.slot));
        commit_products();
        pass_turn();
        wait_products<1>();
        release(k_empty());
        prepare_scores(scores, a.premultiply);
    }

    // The tiles but the first: scores of each beside the values of the tile before.
    __device__ __forceinline__ void go_on(const Work& work, const Span& span, Out& out, Weights& weights, Rows& rows) {
        const Sight sight = sight_of(work);
        int tile = span.end - 2;
        auto turn = [&](bool hidden) {
            if (!Config::OVERLAP) {
                end(out, weights, rows);
                begin<false>(tile, hidden, sight, span, weights, rows);
                return;
            }
            const Place<Config::STAGES> before = place;
            place.next();
            Scores scores;
            multiply_both(scores, out, weights, rows, before);
            release_queries_after(tile, span);
            if (hidden) hide(scores, sight.from(tile * Config::BN, a));
            weigh(scores, rows, a);
            wait_products<0>();
            release(base + Shared::v_empty + 8 * before.slot);
            pack_weights(weights, scores);
            if (Config::DV <= 128) scale_out(out, rows);
        };
        if (Config::BOUNDED) {
#pragma unroll 1
            for (; tile >= (Config::LEFT ? max(span.begin, span.clean_end) : span.clean_end); --tile) turn(true);
            const int clean_begin = Config::LEFT ? max(span.begin, span.clean_begin) : 0;
#pragma unroll 1
            for (; tile >= clean_begin; --tile) turn(false);
            if (Config::LEFT) {
#pragma unroll 1
                for (; tile >= span.begin; --tile) turn(true);
            }
        } else {
#pragma unroll 1
            for (; tile >= 0; --tile) turn(false);
        }
    }

    // The values of a tile, where nothing goes on beside it.
    __device__ __forceinline__ void end(Out& out, Weights& weights, Rows& rows) {
        if (Config::DV > 128 || !Config::OVERLAP) scale_out(out, rows);
        barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
        begin_products();
        multiply_weights_and_values(out, weights, v_words(place.slot));
        commit_products();
        wait_products<0>();
        release(base + Shared::v_empty + 8 * place.slot);
        place.next();
    }

    __device__ __forceinline__ void run() {
        auto prepare = [&](const Work& work) { clear_dead_values(work); };
        auto walk = [&](const Work& work, const Span& span, Out& out, Rows& rows) {
            Weights weights;
            begin<true>(span.end - 1, true, sight_of(work), span, weights, rows);
            go_on(work, span, out, weights, rows);
            end(out, weights, rows);
        };
        Warpgroup::run(prepare, walk, [](const Work&, const Span&) {});
    }
};

}  // namespace cuflash
#endif
