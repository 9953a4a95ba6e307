// One thread for each warpgroup that adds its shares of dQ to those of other tiles of keys, in global memory.
#pragma once

#include "sm90_backward/work.cuh"

namespace cuflash {

struct Adder {
    const Arguments& a;
    u32 base;
    int group;
    Place<Config::DQ_STAGES> place{0};
    u32* untold = nullptr;  // ORDERED: the counter of the last share

    __device__ __forceinline__ Adder(const Arguments& arguments, u32 shared, int of_group)
        : a(arguments), base(shared), group(of_group) {}

    // Tiles of keys that have added to a share.
    __device__ __forceinline__ u32* counter(i64 share) const { return a.counters + 32 + share; }

    // Until all tiles of keys before this one have.
    __device__ __forceinline__ void await_turn(const u32* counter, u32 turn) const {
        while (read_acquire(counter) != turn) __nanosleep(32);
        fence_async_everywhere();
    }

    // That this tile of keys has added to a share may be told when its copies are complete. That takes longer than the next
    // share may wait, which is therefore handed on first; at the latest with the work, for others may wait for it.
    template <int LATER>
    __device__ __forceinline__ void pass_turn() {
        if (!Config::ORDERED || untold == nullptr) return;
        wait_stores<LATER>();
        fence_async_everywhere();
        add_release(untold, 1);
        untold = nullptr;
    }

    // A share of a tile.
    __device__ __forceinline__ void add(const Work& work, int of_group, int tile) {
        const i64 share = work.place_of(of_group, tile, a) * Config::GROUPS + group;  // they lie one after the other
        if (Config::ORDERED) await_turn(counter(share), work.turn(tile, a));
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
        pass_turn<Config::DQ_CHUNKS>();
        untold = counter(share);
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
            pass_turn<0>();
        }
        wait_stores();
    }
};

}  // namespace cuflash
