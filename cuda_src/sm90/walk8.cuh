// A warpgroup's walk over key tiles of 8 bits, by halves of 64 keys, from the last to the first. Exponentials take as long as
// products here, so that both always have to be at work: while the scores of one half become weights, the weights of the half
// before are multiplied with values, and the queries with the keys of the half after.
#pragma once

#include "sm90/warpgroup.cuh"

#if CONFIG_BITS == 8
namespace cuflash {

// Scales of a head's keys as a thread needs them, from the last to the first. Asked for ahead of their use.
struct KeyScales {
    static constexpr int COUNT = Config::COLUMNS / 64;
    int after;  // which of all come next
    KeyFactors next;

    __device__ __forceinline__ KeyScales(const Work& work, const Span& span, const Arguments& a) {
        const int head = work.entry * (a.q_heads / a.group) + work.head / a.group;
        after = (head * a.key_blocks + span.end * (Config::BN / 64) - COUNT) * 4 + threadIdx.x % 4;
        ask(a);
        after -= 4 * COUNT;
    }
    __device__ __forceinline__ void ask(const Arguments& a) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(next[i]) : "l"(a.k_scales + after + 4 * i));
    }
    // Those asked for; then those after them are, if there are MORE.
    __device__ __forceinline__ void take(KeyFactors& factors, bool more, const Arguments& a) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) factors[i] = next[i] == 0.f ? TINY : next[i];  // a NaN stays one
        ask(a);
        if (more) after -= 4 * COUNT;
    }
};

struct Consumer : Warpgroup {
    using Warpgroup::Warpgroup;

    __device__ __forceinline__ int slot_before() const { return place.slot == 0 ? Config::STAGES - 1 : place.slot - 1; }
    __device__ __forceinline__ void await_values() const {
        barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
    }

    // The products of queries with keys in a slot begin, from one of them on.
    __device__ __forceinline__ void begin_scores(Scores& scores, int slot, int from = 0) const {
        const u32 keys = low_word(base + Shared::k, 16) + slot * (Shared::K_STAGE >> 4);
        begin_products();
        multiply_queries_and_keys(scores, q_words(), keys + (from * Config::QK_ROW >> 4));
        commit_products();
    }
    template <int FROM = 0>
    __device__ __forceinline__ void begin_values(Out& out, const Weights& weights, int slot) const {
        begin_products();
        multiply_weights_and_values<FROM>(out, weights, v_words(slot));
        commit_products();
    }

    // To registers that no product reads. The compiler must not see that it is a copy, or products read what is beside them.
    __device__ __forceinline__ void copy(Weights& to, const Weights& from) const {
        const u32 zero = u32(a.group) >> 31;
#pragma unroll
        for (int i = 0; i < Config::COLUMNS / 8; ++i) asm volatile("or.b32 %0, %1, %2;" : "=r"(to[i]) : "r"(from[i]), "r"(zero));
    }

    // Of one turn: scores become weights, beside what products go on. Hidden scores are changed in their registers only where
    // none do, for which registers are lacking elsewhere.
    template <bool HIDDEN>
    __device__ __forceinline__ bool weigh_turn(Weights& next, Scores& scores, int first_key, const Work& work, Rows& rows,
                                               const KeyFactors& keys) const {
        const Seen seen = sight_of(work).from(first_key, a);
        constexpr bool IN_PLACE = HIDDEN && (Config::DV > 128 || Config::LEFT || Config::GROUPS == 3);
        if (IN_PLACE) {
            wait_products<0>();
            hide(scores, seen);
        }
        // Exponentials of two warpgroups at a time would end together, and leave nothing to do beside both their products.
        await_turn();
        if (Config::PING_PONG) {  // what comes from memory after a barrier can't be used before it
            const float zero = load_float(base + Shared::zero);
            rows.top[0] += zero, rows.top[1] += zero;
        }
        const bool moved = weigh<HIDDEN && !IN_PLACE>(next, scores, rows, keys, seen);
        if (Config::PING_PONG && !Config::LAGGING)  // nor what is stored before a barrier be computed after it
            store_float(base + Shared::sums + 4 * group, rows.total[0] + rows.total[1]);
        pass_turn();
        return moved;
    }

    // A half of a tile, AHEAD: its scores become weights; then its products with values begin, and those of the same half of
    // the next tile. Meanwhile go on products with values of the half before, and with keys of the half after this one.
    template <int HALF, bool HIDDEN>
    __device__ __forceinline__ void turn(int tile, const Work& work, const Span& span, Out& out, Weights& weights, Scores& scores,
                                         Rows& rows, KeyScales& scales) const {
        const bool more = tile > span.begin;
        KeyFactors keys;
        scales.take(keys, more, a);
        Weights next;
        const bool moved = weigh_turn<HIDDEN>(next, scores, tile * Config::BN + HALF * Config::COLUMNS, work, rows, keys);
        wait_products<0>();
        if (HALF == 1) {
            release(k_empty());
            if (!more) release_queries();
            if (tile + 1 < span.end) release(v_empty(slot_before()));
        }
        copy(weights, next);
        if (moved) scale_out(out, rows);
        if (HALF == 1) await_values();
        begin_values<HALF * Config::COLUMNS>(out, weights, place.slot);
        if (more) {
            Place<Config::STAGES> after = place;
            after.next();
            if (HALF == 1) barrier_wait(base + Shared::k_full + 8 * after.slot, after.parity);
            start_scores(scores);
            begin_scores(scores, after.slot, HALF * Config::COLUMNS);
        }
    }

    __device__ __forceinline__ void walk_ahead(const Work& work, const Span& span, Out& out, Rows& rows) {
        KeyScales scales(work, span, a);
        Scores second, first;
        Weights weights;
        barrier_wait(k_full(), place.parity);
        start_scores(second), start_scores(first);
        begin_scores(second, place.slot, Config::COLUMNS), begin_scores(first, place.slot);
        wait_products<0>();
        for_tiles(span.end - 1, span, [&](int tile, auto hidden) {
            turn<1, decltype(hidden)::value>(tile, work, span, out, weights, second, rows, scales);
            turn<0, decltype(hidden)::value>(tile, work, span, out, weights, first, rows, scales);
            place.next();
        });
        wait_products<0>();
        release(v_empty(slot_before()));
    }

    // Scores of each tile beside the values of the tile before.
    __device__ __forceinline__ void walk_beside(const Work& work, const Span& span, Out& out, Rows& rows) {
        KeyScales scales(work, span, a);
        Scores scores;
        Weights weights, next;
        bool first = true;
        for_tiles(span.end - 1, span, [&](int tile, auto hidden) {
            const Place<Config::STAGES> before = place;
            if (!first) place.next();
            KeyFactors keys;
            scales.take(keys, tile > span.begin, a);
            barrier_wait(k_full(), place.parity);
            start_scores(scores);
            begin_scores(scores, place.slot);
            if (!first) {
                barrier_wait(base + Shared::v_full + 8 * before.slot, before.parity);
                begin_values(out, weights, before.slot);
                wait_products<1>();
            } else {
                wait_products<0>();
            }
            release(k_empty());
            if (tile == span.begin) release_queries();
            const bool moved = weigh_turn<decltype(hidden)::value>(next, scores, tile * Config::BN, work, rows, keys);
            wait_products<0>();
            if (!first) release(v_empty(before.slot));
            copy(weights, next);
            if (moved) scale_out(out, rows);
            first = false;
        });
        await_values();
        begin_values(out, weights, place.slot);
        wait_products<0>();
        release(v_empty(place.slot));
        place.next();
    }

    struct Yes {
        static constexpr bool value = true;
    };
    struct No {
        static constexpr bool value = false;
    };
    // `each(tile, hidden)`, from `tile` down to the first of a span. Of the first one some scores may be hidden anyway.
    template <typename Each>
    __device__ __forceinline__ void for_tiles(int tile, const Span& span, Each each) const {
        each(tile--, Yes());
        if (Config::BOUNDED) {
#pragma unroll 1
            for (; tile >= (Config::LEFT ? max(span.begin, span.clean_end) : span.clean_end); --tile) each(tile, Yes());
            const int clean_begin = Config::LEFT ? max(span.begin, span.clean_begin) : 0;
#pragma unroll 1
            for (; tile >= clean_begin; --tile) each(tile, No());
            if (Config::LEFT) {
#pragma unroll 1
                for (; tile >= span.begin; --tile) each(tile, Yes());
            }
        } else {
#pragma unroll 1
            for (; tile >= 0; --tile) each(tile, No());
        }
    }

    __device__ __forceinline__ void run() {
        Warpgroup::run([&](const Work& work, const Span& span, Out& out, Rows& rows) {
            if (Config::AHEAD)
                walk_ahead(work, span, out, rows);
            else
                walk_beside(work, span, out, rows);
        });
    }
};

}  // namespace cuflash
#endif
