// Two threads that fetch by tensor copies as fast as places come free: one finds the work and has tiles of Q and dO brought,
// which may be those of the next piece while one is under way; the other K and V, for which it has to be over.
#pragma once

#include "sm90_backward/work.cuh"

namespace cuflash {

template <int WIDTH, int ROWS>
__device__ __forceinline__ void load_tile(u32 to, const TensorMap& map, u32 full, int head, int row, int entry) {
#pragma unroll
    for (int panel = 0; panel < WIDTH / Config::PANEL; ++panel)
        load_box(to + panel * ROWS * Config::ROW, map, full, panel * Config::PANEL, head, row, entry);
}

struct QueryProducer {
    const Arguments& a;
    u32 base;
    Place<Config::Q_STAGES> q_place{1};
    Place<Config::O_STAGES> o_place{1};
    Place<2> work_place{1};

    __device__ __forceinline__ QueryProducer(const Arguments& arguments, u32 shared) : a(arguments), base(shared) {}

    __device__ __forceinline__ void hand_over(const Work& work) {
        barrier_wait(base + Shared::work_empty + 8 * work_place.slot, work_place.parity);
        work.put(base + Shared::works + 64 * work_place.slot);
        barrier_arrive(base + Shared::work_full + 8 * work_place.slot);
        work_place.next();
    }

    // `stats` are those of the tile's rows.
    __device__ __forceinline__ void load_queries(int entry, int head, int tile, const float* stats) {
        const u32 full = base + Shared::q_full + 8 * q_place.slot;
        barrier_wait(base + Shared::q_empty + 8 * q_place.slot, q_place.parity);
        barrier_expect(full, Shared::Q + 2 * Shared::STATS);
        load_tile<Config::D, Config::BM>(base + Shared::q + q_place.slot * Shared::Q, a.q, full, head, tile * Config::BM,
                                         entry);
        load_bytes(base + Shared::lse + q_place.slot * Shared::STATS, stats, Shared::STATS, full);
        load_bytes(base + Shared::delta + q_place.slot * Shared::STATS, stats + a.all_rows, Shared::STATS, full);
        q_place.next();
    }
    __device__ __forceinline__ void load_gradients(int entry, int head, int tile) {
        const u32 full = base + Shared::o_full + 8 * o_place.slot;
        barrier_wait(base + Shared::o_empty + 8 * o_place.slot, o_place.parity);
        barrier_expect(full, Shared::O);
        load_tile<Config::DV, Config::BM>(base + Shared::o + o_place.slot * Shared::O, a.dout, full, head, tile * Config::BM,
                                          entry);
        o_place.next();
    }

    // Tiles of queries from the last to the first, of one head after the other.
    __device__ __forceinline__ void fetch(const Work& work) {
#pragma unroll 1
        for (int of_group = 0; of_group < a.group; ++of_group) {
            const int head = work.kv_head * a.group + of_group;
            const float* stats = a.row_stats + work.place_of(of_group, work.end, a) * Config::BM;
#pragma unroll 1
            for (int tile = work.end - 1; tile >= work.begin; --tile) {
                stats -= Config::BM;
                load_queries(work.entry, head, tile, stats);
                load_gradients(work.entry, head, tile);
            }
        }
    }

    __device__ __forceinline__ void run() {
        // Tickets are drawn by blocks that run, in the order in which they are drawn: a block that waits for a lower
        // ticket's share of dQ waits for one that runs too, whatever else the device does.
        u32 ticket = atomicAdd(a.counters, 1);
        while (ticket < a.tickets) {
            Work work;
            work.find(ticket, a);
            hand_over(work);
            fetch(work);
            ticket = atomicAdd(a.counters, 1);
        }
        Work none = {};
        none.entry = -1;
        hand_over(none);
    }
};

struct KeyProducer {
    const Arguments& a;
    u32 base;

    __device__ __forceinline__ KeyProducer(const Arguments& arguments, u32 shared) : a(arguments), base(shared) {}

    // This piece of work's share of the next section's dQ is set to 0: so late that it is in the L2 cache still when the first
    // tiles of keys add to it.
    __device__ __forceinline__ void clear_next(const Work& work) const {
        const u32 next = work.section + 1;
        if (next >= a.sections) return;
        const u32 heads = min(a.section, a.all_kv_heads - next * a.section);
        const u64 tiles = u64(heads * a.group) * a.q_tiles, pieces = a.section * a.key_tiles;
        const u64 first = u64(next * a.section * a.group) * a.q_tiles;
        constexpr u32 FLOATS = Config::BM * Config::D, AT_ONCE = Shared::ZEROS / 4;
        float* at = a.sums + (first + tiles * work.in_section / pieces) * FLOATS;
        const float* const end = a.sums + (first + tiles * (work.in_section + 1) / pieces) * FLOATS;
#pragma unroll 1
        for (; at < end; at += AT_ONCE) store_bytes(at, base + Shared::zeros, Shared::ZEROS);
        commit_stores();
        wait_stores();
        add_release(a.counters + FIRST_TURN + next, 1);
    }

    __device__ __forceinline__ void run() {
        const u32 k_full = base + Shared::k_full, v_full = base + Shared::v_full;
        Works<false> works;
        Work work;
        u32 parity = 1;
        while (works.next(work, base)) {
            works.release(base);
            barrier_wait(base + Shared::kv_empty, parity);
            parity ^= 1;
            if (work.begin == work.end) {  // nothing to fetch for keys that no row sees
                barrier_arrive(k_full), barrier_arrive(v_full);
            } else {
                const int first = work.tile * Config::BN;
                barrier_expect(k_full, Shared::K);
                load_tile<Config::D, Config::BN>(base + Shared::k, a.k, k_full, work.kv_head, first, work.entry);
                barrier_expect(v_full, Shared::V);
                load_tile<Config::DV, Config::BN>(base + Shared::v, a.v, v_full, work.kv_head, first, work.entry);
            }
            clear_next(work);
        }
    }
};

}  // namespace cuflash
