// One thread for each warpgroup that adds its shares of dQ to those of other tiles of keys, in global memory.
#pragma once

#include "sm90_backward/work.cuh"

namespace cuflash {

struct Adder {
    const Arguments& a;
    u32 base;
    int group;
    Place<Config::DQ_STAGES> place{0};

    __device__ __forceinline__ Adder(const Arguments& arguments, u32 shared, int of_group)
        : a(arguments), base(shared), group(of_group) {}

    // ORDERED. Tiles of keys that have added to this warpgroup's shares of a few tiles of queries, which are handed on together:
    // to wait for a turn and to pass it on takes the time of a tile.
    __device__ __forceinline__ u32* counter(const Work& work, int of_group, int tile) const {
        return a.counters + 32 + work.place_of(of_group, first_of_turn(tile), a) * Config::GROUPS + group;
    }
    // Until all tiles of keys before this one have.
    __device__ __forceinline__ void await_turn(const Work& work, int of_group, int tile) const {
        const u32* added = counter(work, of_group, tile);
        const u32 turn = work.turn(tile, a);
        while (read_acquire(added) != turn) __nanosleep(32);
        fence_async_global();
    }
    __device__ __forceinline__ void pass_turn(const Work& work, int of_group, int tile) const {
        wait_stores();
        add_release(counter(work, of_group, tile), 1);
    }

    // A share of a tile.
    __device__ __forceinline__ void add(const Work& work, int of_group, int tile) {
        const i64 share = work.place_of(of_group, tile, a) * Config::GROUPS + group;  // they lie one after the other
        const bool first = tile == work.end - 1 || first_of_turn(tile) != first_of_turn(tile + 1);
        const bool last = tile == work.begin || first_of_turn(tile) == tile;
        if (Config::ORDERED && first) await_turn(work, of_group, tile);
#pragma unroll 1
        for (int chunk = 0; chunk < Config::DQ_CHUNKS; ++chunk) {
            const int buffer = group * Config::DQ_STAGES + place.slot;
            barrier_wait(base + Shared::dq_full + 8 * buffer, place.parity);
            add_floats(a.sums + (share * Config::DQ_CHUNKS + chunk) * (Shared::DQ / 4), base + Shared::dq + buffer * Shared::DQ,
                       Shared::DQ);
            commit_stores();
            wait_stores_read();
            barrier_arrive(base + Shared::dq_empty + 8 * buffer);
            place.next();
        }
        if (Config::ORDERED && last) pass_turn(work, of_group, tile);
    }

    __device__ __forceinline__ void run() {
        Works<false> works;
        Work work;
        while (works.next(work, base)) {
            works.release(base);
            for (int of_group = 0; of_group < a.group; ++of_group) {
#pragma unroll 1
                for (int tile = work.end - 1; tile >= work.begin; --tile) add(work, of_group, tile);
            }
        }
        wait_stores();
    }
};

}  // namespace cuflash
