// A warpgroup's walk over tiles of 64 keys in 8 bits, from the last to the first: scores of each beside the products of the
// weights before them with values, which also go on while these scores become weights.
#pragma once

#include "sm90/warpgroup.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

// Scales of a head's keys, from the last to the first: of each 64, of the 16 that a thread has. Asked for ahead of their use.
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

    // Scores of a tile beside the products of `before`, weights of the tile before it, with values; then `made` of the scores.
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

    __device__ __forceinline__ void walk(const Work& work, const Span& span, Out& out, Rows& rows) {
        KeyScales scales(work, span, a);
        Weights weights, next;
        const int seen_begin = Config::LEFT ? max(span.begin, span.clean_begin) : 0;
        const int seen_end = Config::BOUNDED ? min(span.clean_end, span.end - 1) : span.end - 1;
        int tile = span.end - 1;
        auto hidden_to = [&](int end) {
#pragma unroll 1
            for (; tile >= end; --tile) step<true>(tile, work, span, out, weights, weights, rows, scales);
        };
        hidden_to(Config::LEFT ? max(seen_end, span.begin) : seen_end);
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
            hidden_to(span.begin);
            in_next = false;
        }
        release_queries();
        await_values();
        if (in_next)
            begin_values(out, next, place.slot);
        else
            begin_values(out, weights, place.slot);
        wait_products<0>();
        release(v_empty(place.slot));
        place = after;
    }

    __device__ __forceinline__ void run() {
        auto prepare = [](const Work&) {};
        Warpgroup::run(prepare, [&](const Work& work, const Span& span, Out& out, Rows& rows) { walk(work, span, out, rows); });
    }
};

}  // namespace cuflash
#endif
