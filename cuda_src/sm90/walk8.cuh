// A warpgroup's walk over tiles of 64 keys in 8 bits, from the last to the first: scores of each beside the products of the
// weights before them with values, which also go on while these scores become weights.
#pragma once

#include "sm90/warpgroup.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

// Scales of a head's keys, from the last to the first: of each 64, of the 16 that a thread has. Asked for ahead of their
// use.
struct KeyScales {
    int asked;  // which of all is `next`
    float next;

    __device__ __forceinline__ KeyScales(const Work& work, const Span& span, const Arguments& a) {
        asked = (work.kv_row * a.key_blocks + span.end - 1) * 4 + Thread().lane() % 4;
        ask(a);
    }
    __device__ __forceinline__ void ask(const Arguments& a) {
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(next) : "l"(a.k_scales + asked));
    }
    // That asked for; then the one after it is, if there are `more`, else the same again.
    __device__ __forceinline__ float take(bool more, const Arguments& a) {
        const float taken = next;
        if (more) asked -= 4;
        ask(a);
        return taken;
    }
};

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;
    Place<Config::STAGES> after{0};  // the place after `place`, known ahead
    static constexpr int FIRST_TILES = Config::FIRST ? 2 : 0;  // whose values are of 16 bits
    u32 first_parity = 0;

    __device__ __forceinline__ void await_values() const {
        barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
    }

    __device__ __forceinline__ void begin_values(Out& out, const Weights& weights, int slot) const {
        begin_products();
        multiply_weights_and_values(out, weights, v_words(slot));
        commit_products();
    }

    // To registers that no product reads. The compiler must not see that it is a copy, or products read what is beside them.
    __device__ __forceinline__ void copy(Weights& to, const Weights& from) const {
        const u32 zero = u32(a.group) >> 31;
#pragma unroll
        for (int i = 0; i < Config::BN / 8; ++i) asm volatile("or.b32 %0, %1, %2;" : "=r"(to[i]) : "r"(from[i]), "r"(zero));
    }

    // Scores of a tile beside the products of `before`, weights of the tile before it, with values; then `made` of the
    // scores.
    template <bool HIDDEN>
    __device__ __forceinline__ void step(int tile, const Work& work, const Span& span, Out& out, const Weights& before,
                                         Weights& made, Rows& rows, KeyScales& scales) {
        const bool first = tile == span.end - 1;
        const Place<Config::STAGES> values = place;
        if (!HIDDEN || !first) place = after;
        Products products;
        float key_scale = scales.take(tile > span.begin, a);
        barrier_wait(k_full(), place.parity);
        begin_products();
        multiply_queries_and_keys(products, q_words(), k_words());
        commit_products();
        after = place;
        after.next();
        if (!HIDDEN || !first) {
            barrier_wait(base + Shared::v_full + 8 * values.slot, values.parity);
            begin_values(out, before, values.slot);
        }
        wait_products<HIDDEN ? 0 : 1>();
        release(k_empty());
        Scores& scores = as_floats(products);
        if (HIDDEN) {  // no products go on beside
            hide(scores, sight_of(work).from(tile * Config::BN, a));
            if (key_scale == 0.f) key_scale = TINY;
        }
        const bool moved = weigh(made, scores, rows, key_scale, HIDDEN && first, a);
        wait_products<0>();
        if (!HIDDEN || !first) release(v_empty(values.slot));
        if (moved) scale_out(out, rows);
    }

    // Values of 16 bits come for each work whose rows see the first keys, and all warpgroups take and leave them: those
    // without such a tile of their own when they have passed over others' tiles, for which the producer may wait.
    __device__ __forceinline__ void await_first_values() {
        barrier_wait(base + Shared::first_full, first_parity);
        first_parity ^= 1;
    }
    __device__ __forceinline__ void release_first_values() const {
        meet(STORE + group, 128);  // a warp that still waits could miss a phase
        if (is_leader()) barrier_arrive(base + Shared::first_empty);
    }

    // A tile of the first keys, whose values are of 16 bits: nothing goes on beside anything.
    __device__ __forceinline__ void step_first(int tile, const Work& work, const Span& span, Out& out, Rows& rows,
                                               KeyScales& scales) {
        Products products;
        float key_scale = scales.take(tile > span.begin, a);
        barrier_wait(k_full(), place.parity);
        begin_products();
        multiply_queries_and_keys(products, q_words(), k_words());
        commit_products();
        wait_products<0>();
        release(k_empty());
        if (tile == span.begin) release_queries();
        Scores& scores = as_floats(products);
        hide(scores, sight_of(work).from(tile * Config::BN, a));
        if (key_scale == 0.f) key_scale = TINY;
        Weights16 weights;
        const u32 first_words = low_word(base + Shared::first, Shared::FIRST_PANEL);
        if (weigh(weights, scores, rows, key_scale, tile == span.end - 1, a)) scale_out(out, rows);
        await_values();  // of 8 bits, which come too; before products, for which warps meet: one could miss a phase
        begin_products();
        multiply_weights_and_first_values(out, weights, first_words + tile * (Config::BN * 128 >> 4));
        commit_products();
        wait_products<0>();
        release(v_empty(place.slot));
        place.next();
    }

    __device__ __forceinline__ void walk_tiles(const Work& work, const Span& span, Out& out, Rows& rows) {
        KeyScales scales(work, span, a);
        const int begin = max(span.begin, FIRST_TILES);
        int tile = span.end - 1;
        if (!Config::FIRST || tile >= begin) {
            Weights weights, next;
            const int seen_begin = Config::LEFT ? max(begin, span.clean_begin) : FIRST_TILES;
            const int seen_end = max(FIRST_TILES, Config::BOUNDED ? min(span.clean_end, span.end - 1) : span.end - 1);
            auto hidden_to = [&](int end) {
#pragma unroll 1
                for (; tile >= end; --tile) step<true>(tile, work, span, out, weights, weights, rows, scales);
            };
            hidden_to(Config::LEFT ? max(seen_end, begin) : seen_end);
            // By turns, so that what is multiplied need not be copied from where it was made.
            bool in_next = false;
#pragma unroll 1
            while (tile >= seen_begin) {
                step<false>(tile--, work, span, out, weights, next, rows, scales);
                in_next = tile < seen_begin;
                if (in_next) break;
                step<false>(tile--, work, span, out, next, weights, rows, scales);
            }
            if (Config::LEFT) {
                if (in_next) copy(weights, next);
                hidden_to(begin);
                in_next = false;
            }
            if (!Config::FIRST || tile < span.begin) release_queries();
            await_values();
            if (in_next)
                begin_values(out, next, place.slot);
            else
                begin_values(out, weights, place.slot);
            wait_products<0>();
            release(v_empty(place.slot));
            place = after;
        }
        if (Config::FIRST && span.begin < FIRST_TILES) {
            await_first_values();
#pragma unroll 1
            for (; tile >= span.begin; --tile) step_first(tile, work, span, out, rows, scales);
            release_first_values();
        }
    }

    __device__ __forceinline__ void run() {
        auto prepare = [](const Work&) {};
        auto walk = [&](const Work& work, const Span& span, Out& out, Rows& rows) { walk_tiles(work, span, out, rows); };
        auto leave = [&](const Work& work, const Span& span) {
            if (!Config::FIRST || work.begin >= FIRST_TILES || span.begin < FIRST_TILES) return;
            await_first_values();
            release_first_values();
        };
        Warpgroup::run(prepare, walk, leave);
    }
};

}  // namespace cuflash
#endif
