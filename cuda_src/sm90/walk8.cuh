// A warpgroup's walk over key tiles of 8 bits, by halves of 64 keys, from the last to the first. Exponentials take as long as
// products here, so that both always have to be at work: while the scores of one half become weights, the weights of the half
// before are multiplied with values, and the queries with the keys of the half after.
#pragma once

#include "sm90/warpgroup.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

// Scales of a head's keys, as a thread needs them: one for each half. Asked for a half ahead.
struct KeyScales {
    int after;  // which of all
    float next;

    __device__ __forceinline__ KeyScales(const Work& work, const Span& span, const Arguments& a) {
        const int head = work.entry * (a.q_heads / a.group) + work.head / a.group;
        after = (head * a.key_blocks + 2 * span.end - 1) * 4 + threadIdx.x % 4;
        next = __ldg(a.k_scales + after);
        after -= 4;
    }
    __device__ __forceinline__ float take(bool more, const Arguments& a) {
        const float scale = next == 0.f ? TINY : next;  // a NaN stays one
        asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(next) : "l"(a.k_scales + after));
        if (more) after -= 4;
        return scale;
    }
};

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;

    // The products of queries with a half of the keys in a slot begin.
    __device__ __forceinline__ void begin_scores(Scores& scores, int slot, int half) const {
        const u32 keys = low_word(base + Shared::k, 16) + slot * (Shared::K_STAGE >> 4);
        begin_products();
        multiply_queries_and_keys(scores, q_words(), keys + (half * 64 * Config::QK_ROW >> 4));
        commit_products();
    }

    // Those of the half before are done: with its values, and with the keys of the half after this one.
    __device__ __forceinline__ void end_products(int half, int tile, const Span& span) const {
        wait_products<0>();
        if (half == 0) return;
        release(k_empty());
        if (tile == span.begin) release_queries();
        if (tile + 1 < span.end) release(v_empty(slot_before()));
    }

    // To registers that no product reads. The compiler must not see that it is a copy, or products read what is beside them.
    __device__ __forceinline__ void copy(Weights& to, const Weights& from) const {
        const u32 zero = u32(a.group) >> 31;
#pragma unroll
        for (int i = 0; i < Config::COLUMNS / 8; ++i) asm volatile("or.b32 %0, %1, %2;" : "=r"(to[i]) : "r"(from[i]), "r"(zero));
    }

    // Scores of the second half, HALF 1, or the first become weights; then products with the values of that half begin, and
    // with the keys of the same half of the next tile.
    template <int HALF, bool HIDDEN>
    __device__ __forceinline__ void turn(int tile, const Work& work, const Span& span, Out& out, Weights& weights, Scores& scores,
                                         Rows& rows, KeyScales& scales) const {
        const bool more = tile > span.begin;
        const float key_scale = scales.take(more, a);
        const Seen seen = sight_of(work).from(tile * Config::BN + 64 * HALF, a);
        Weights next;
        bool moved;
        if (HIDDEN && Config::DV > 128) {  // registers are lacking to hide scores while products go on
            wait_products<0>();
            hide(scores, seen);
            moved = weigh<false>(next, scores, rows, key_scale, seen);
        } else {
            moved = weigh<HIDDEN>(next, scores, rows, key_scale, seen);
        }
        end_products(HALF, tile, span);
        copy(weights, next);
        if (moved) scale_out(out, rows);
        if (HALF == 1) barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
        begin_products();
        multiply_weights_and_values<64 * HALF>(out, weights, v_words(place.slot));
        commit_products();
        if (more) {
            Place<Config::STAGES> after = place;
            after.next();
            if (HALF == 1) barrier_wait(base + Shared::k_full + 8 * after.slot, after.parity);
            start_scores(scores);
            begin_scores(scores, after.slot, HALF);
        }
    }

    __device__ __forceinline__ int slot_before() const { return place.slot == 0 ? Config::STAGES - 1 : place.slot - 1; }

    __device__ __forceinline__ void walk(const Work& work, const Span& span, Out& out, Rows& rows) {
        KeyScales scales(work, span, a);
        Scores second, first;
        Weights weights;
        auto both = [&](int tile, auto hidden) {
            turn<1, decltype(hidden)::value>(tile, work, span, out, weights, second, rows, scales);
            turn<0, decltype(hidden)::value>(tile, work, span, out, weights, first, rows, scales);
            place.next();
        };
        barrier_wait(k_full(), place.parity);
        start_scores(second), start_scores(first);
        begin_scores(second, place.slot, 1), begin_scores(first, place.slot, 0);
        wait_products<0>();
        int tile = span.end - 1;
        both(tile--, Yes());
        if (Config::BOUNDED) {
#pragma unroll 1
            for (; tile >= (Config::LEFT ? max(span.begin, span.clean_end) : span.clean_end); --tile) both(tile, Yes());
            const int clean_begin = Config::LEFT ? max(span.begin, span.clean_begin) : 0;
#pragma unroll 1
            for (; tile >= clean_begin; --tile) both(tile, No());
            if (Config::LEFT) {
#pragma unroll 1
                for (; tile >= span.begin; --tile) both(tile, Yes());
            }
        } else {
#pragma unroll 1
            for (; tile >= 0; --tile) both(tile, No());
        }
        wait_products<0>();
        release(v_empty(slot_before()));
    }

    struct Yes {
        static constexpr bool value = true;
    };
    struct No {
        static constexpr bool value = false;
    };

    __device__ __forceinline__ void run() {
        Warpgroup::run([&](const Work& work, const Span& span, Out& out, Rows& rows) { walk(work, span, out, rows); });
    }
};

}  // namespace cuflash
#endif
