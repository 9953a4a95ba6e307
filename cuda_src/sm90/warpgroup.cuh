// What warpgroups that multiply do from work to work: each has 64 lines, query rows of `pack` heads that share keys. Line i
// is row i / pack of head i % pack. How they walk the key tiles that their rows see is in walk16.cuh and walk8.cuh.
#pragma once

#include "sm90/products.cuh"

namespace cuflash {

enum NamedBarrier { TURN = 1, STORE = 5, CONSUMERS = 9 };  // TURN and STORE: one for each warpgroup; 0 is __syncthreads

struct Warpgroup {
    const Arguments& a;
    u32 base;
    int group;
    Place<Config::STAGES> place{0};  // of K; V's is the same, one tile later
    Place<2> work_place{0};
    u32 q_parity = 0;

    __device__ __forceinline__ Warpgroup(const Arguments& arguments, u32 shared, int of_group)
        : a(arguments), base(shared), group(of_group) {}

    __device__ __forceinline__ static bool is_leader() { return threadIdx.x % 128 == 0; }

    // All of this warpgroup have read a stage; its owners are the producers of the whole cluster.
    __device__ __forceinline__ void release(u32 empty) const {
        if (Config::CLUSTER == 1) {
            if (is_leader()) barrier_arrive(empty);
        } else if (threadIdx.x % 128 < 2) {
            barrier_arrive_in(empty, threadIdx.x % 128);
        }
    }
    __device__ __forceinline__ void await_turn() const {
        if (Config::PING_PONG) meet(TURN + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (Config::PING_PONG) announce(TURN + (group + 1 == Config::GROUPS ? 0 : group + 1), 256);
    }
    __device__ __forceinline__ u32 k_full() const { return base + Shared::k_full + 8 * place.slot; }
    __device__ __forceinline__ u32 k_empty() const { return base + Shared::k_empty + 8 * place.slot; }
    __device__ __forceinline__ u32 k_words() const {
        return low_word(base + Shared::k, 16) + place.slot * (Shared::K_STAGE >> 4);
    }
    __device__ __forceinline__ u32 v_words(int slot) const {
        return low_word(base + Shared::v, Config::EIGHT ? 16 : Config::BN * Config::V_ROW) + slot * (Shared::V_STAGE >> 4);
    }
    __device__ __forceinline__ u32 v_empty(int slot) const { return base + Shared::v_empty + 8 * slot; }

    __device__ __forceinline__ bool next_work(Work& work) {
        barrier_wait(base + Shared::work_full + 8 * work_place.slot, work_place.parity);
        work.get(base + Shared::works + 64 * work_place.slot);
        barrier_arrive(base + Shared::work_empty + 8 * work_place.slot);  // every reader: a warp need not meet here
        work_place.next();
        return work.entry >= 0;
    }

    // Lines that no row of a head ever comes to: what memory held there might be NaN, and slow its warp.
    __device__ __forceinline__ void clear_unused_lines() const {
        const int used = a.rows * a.pack;
        if (used == 64) return;
        constexpr int UNITS = Config::QK_ROW / 16;
        const u32 zeros[4] = {0, 0, 0, 0};
        for (int i = threadIdx.x % 128; i < (64 - used) * UNITS * (Config::D / Config::QK_PANEL); i += 128) {
            const int unit = i % UNITS, line = i / UNITS % (64 - used), panel = i / UNITS / (64 - used);
            store_unit(base + Shared::q + group * Shared::Q_GROUP + (panel * 64 + used + line) * Config::QK_ROW + 16 * unit,
                       zeros);
        }
        fence_async();
        meet(STORE + group, 128);
    }

    // The next rows of Q may come.
    __device__ __forceinline__ void release_queries() const {
        if (is_leader()) barrier_arrive(base + Shared::q_empty + 8 * group);
    }
    // The same after scores of `tile`: nothing else of this piece of work needs Q if that was the last.
    __device__ __forceinline__ void release_queries_after(int tile, const Span& span) const {
        if (tile == span.begin) release_queries();
    }

    // Whether values are awaited before the products of a piece of work begin; only after that is out of the one before
    // waited for else, since it takes a while to leave.
    static constexpr bool VALUES_FIRST = Config::SKIPS || Config::LENGTHS;
    // Out of the work before has left the place of values, in this block and what it is loaded for.
    __device__ __forceinline__ void tell_out_gone() const {
        if (!Config::OUT_IN_PLACE || !is_leader()) return;
        wait_stores_read();
        const u32 gone = base + Shared::out_gone + 8 * group;
        barrier_arrive(gone);
        if (Config::CLUSTER == 2) barrier_arrive_in(gone, cluster_rank() ^ 1);
    }
    // The place that out leaves from, in shared memory. Of V's the first warpgroup takes the one to be filled next, the
    // other the one filled last: its turn comes after the first has read that.
    __device__ __forceinline__ u32 out_place(const Work& work) const {
        const bool empty = work.begin >= work.end;
        if (!Config::OUT_IN_PLACE || empty) {
            if (is_leader()) wait_stores_read();  // of the work before
            meet(STORE + group, 128);
        }
        if (!Config::OUT_IN_PLACE) return base + Shared::o + group * Shared::O_GROUP;
        const int slot = place.slot ^ group;
        barrier_wait(v_empty(slot), place.parity ^ u32(slot >= place.slot));  // all have read it
        return base + Shared::v + slot * Shared::V_STAGE;
    }

    // Of a thread's two lines, each a row of one of the heads that are packed.
    __device__ __forceinline__ int row_of_pack(int line) const { return line * a.inverse_pack >> 16; }
    __device__ __forceinline__ int row_of(int line, const Work& work) const {
        return work.first_row + group * a.rows + row_of_pack(line);
    }
    __device__ __forceinline__ Sight sight_of(const Work& work) const {
        const Thread thread;
        const int rows[2] = {row_of(thread.line(0), work), row_of(thread.line(1), work)};
        return Sight(work, rows);
    }
    __device__ __forceinline__ u32 q_words() const { return low_word(base + Shared::q + group * Shared::Q_GROUP, 16); }

    // Q of a piece of work has come.
    __device__ __forceinline__ void await_queries() {
        barrier_wait(base + Shared::q_full + 8 * group, q_parity);
        q_parity ^= 1;
    }

    // A tile that none of this warpgroup's rows sees, but some of the block's: it lies BEFORE those that they see, or after.
    // Before its turn the first warpgroup waits for what the others multiply in theirs: keys, and values of the tile before.
    template <bool BEFORE>
    __device__ __forceinline__ void pass() {
        auto turn = [&] {
            barrier_wait(k_full(), place.parity);
            await_turn();
            pass_turn();
        };
        if (BEFORE)
            barrier_wait(k_full(), place.parity);
        else
            turn();
        barrier_wait(base + Shared::v_full + 8 * place.slot, place.parity);
        // Products have the four warps meet; without any, one that still waited could miss a phase, and wait for ever.
        meet(STORE + group, 128);
        release(k_empty()), release(base + Shared::v_empty + 8 * place.slot);
        place.next();
        if (BEFORE) turn();
    }

    // Of a line's row in arrays of (entries, heads, rows).
    __device__ __forceinline__ i64 place_of(int line, const Work& work) const {
        const int head = work.head + line - row_of_pack(line) * a.pack;
        return (i64(work.entry) * a.q_heads + head) * a.q_len + row_of(line, work);
    }
    __device__ __forceinline__ float row_scale(int line, const Work& work) const {
        const bool there = Config::EIGHT && row_of(line, work) < a.q_len && line < a.rows * a.pack;
        return there ? __ldg(a.q_scales + place_of(line, work)) : 1.f;
    }
    __device__ __forceinline__ float lse_shift(int line, const Work& work) const {
        return Config::EIGHT && a.lse_shifts != nullptr ? a.lse_shifts[place_of(line, work)] * (a.factor * 0.693147181f) : 0.f;
    }
    // Values of 8 bits get back their scales, and what they are the differences from.
    __device__ __forceinline__ void finish(const Work& work, const Thread& thread, Out& out, float (&inverse)[2]) const {
        if (!Config::EIGHT) return;
        const i64 head = i64(work.kv_row) * Config::DV + 2 * (thread.lane() % 4);
        const float *scales = a.v_scales + head, *means = a.v_means + head;
#pragma unroll
        for (int tile = 0; tile < Config::DV / 8; ++tile) {
            const float2 scale = __ldg(reinterpret_cast<const float2*>(scales) + 4 * tile);
            const float2 mean = __ldg(reinterpret_cast<const float2*>(means) + 4 * tile);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &first = out[4 * tile + 2 * half], &second = out[4 * tile + 2 * half + 1];
                first = inverse[half] == 0.f ? 0.f : fmaf(first * inverse[half], scale.x, mean.x);
                second = inverse[half] == 0.f ? 0.f : fmaf(second * inverse[half], scale.y, mean.y);
            }
        }
        inverse[0] = inverse[1] = 1.f;
    }

    // Divides by the row sums and stores 64 rows; those without a key are 0.
    __device__ __forceinline__ void store(const Work& work, Out& out, Rows& rows) {
        const Thread thread;
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int line = thread.line(half), row = row_of(line, work);
            float total = rows.total[half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const bool dead = total == 0.f || row >= work.q_len;
            inverse[half] = dead ? 0.f : 1.f / total;
            if (a.lse != nullptr && thread.lane() % 4 == 0 && row < a.q_len && line < a.rows * a.pack)
                a.lse[place_of(line, work)] =
                    dead ? minus_infinity() : lse_of(rows, half, total, a) + lse_shift(line, work);
            if (dead) {  // 0 even where sums are not finite
#pragma unroll
                for (int i = 2 * half; i < Config::DV / 2; i += 4) out[i] = out[i + 1] = 0.f;
            }
        }
        const u32 to = out_place(work);
        finish(work, thread, out, inverse);
        constexpr int STEPS = Config::OUT_PANEL / 16;
        const int at = thread.warp_row() + thread.lane() % 16;
#pragma unroll
        for (int step = 0; step < Config::DV / 16; ++step) {
            const float(&o)[Config::DV / 2] = out;
            const int i = 8 * step;
            const u32 matrices[4] = {pack(o[i] * inverse[0], o[i + 1] * inverse[0], Config::OutElement()),
                                     pack(o[i + 2] * inverse[1], o[i + 3] * inverse[1], Config::OutElement()),
                                     pack(o[i + 4] * inverse[0], o[i + 5] * inverse[0], Config::OutElement()),
                                     pack(o[i + 6] * inverse[1], o[i + 7] * inverse[1], Config::OutElement())};
            const int unit = step % STEPS * 2 + thread.lane() / 16;
            const int swizzled = Config::OUT_ROW == 128 ? unit ^ (at % 8) : unit ^ (at / 2 % 4);
            store_matrices(to + (step / STEPS * 64 + at) * Config::OUT_ROW + 16 * swizzled, matrices);
        }
        fence_async();
        meet(STORE + group, 128);
        if (is_leader()) {
#pragma unroll
            for (int panel = 0; panel < Config::DV / Config::OUT_PANEL; ++panel)
                store_box(a.out, to + panel * 64 * Config::OUT_ROW, panel * Config::OUT_PANEL, work.head,
                          work.first_row + group * a.rows, work.entry);
            commit_stores();
        }
    }

    __device__ __forceinline__ static void clear(Out& out) {
#pragma unroll
        for (int i = 0; i < Config::DV / 2; ++i) out[i] = 0.f;
    }

    // `walk(work, span, out, rows)` takes a warpgroup over the tiles of a span; before any is passed over or walked, all
    // warpgroups `prepare(work)`; after all are, they `leave(work, span)`.
    template <typename Prepare, typename Walk, typename Leave>
    __device__ __forceinline__ void run(Prepare prepare, Walk walk, Leave leave) {
        if (Config::PING_PONG && group == 0) announce(TURN, 256);
        clear_unused_lines();
        Work work;
        bool more = next_work(work);
        while (more) {
            Out out;
            Rows rows;
            const Thread thread;
            const float scales_of_rows[2] = {row_scale(thread.line(0), work), row_scale(thread.line(1), work)};
            clear(out), rows.reset(scales_of_rows, a);
            await_queries();
            const bool empty = work.begin >= work.end;
            if (VALUES_FIRST || empty) tell_out_gone();
            if (empty) {
                store(work, out, rows);
                // Not before all warps have met: one that has missed a phase of q_full would wait for ever.
                release_queries();
                more = next_work(work);
                continue;
            }
            const Span span(work, group, a);
            prepare(work);
            if (Config::SKIPS) {
#pragma unroll 1
                for (int tile = work.end; tile > span.end; --tile) pass<true>();
            }
            walk(work, span, out, rows);
            if (Config::SKIPS && Config::LEFT) {
#pragma unroll 1
                for (int tile = span.begin; tile > work.begin; --tile) pass<false>();
            }
            leave(work, span);
            store(work, out, rows);
            more = next_work(work);  // here: asked for in the condition, it takes registers that some tiles lack
        }
        if (is_leader()) wait_stores();
    }
};

}  // namespace cuflash
