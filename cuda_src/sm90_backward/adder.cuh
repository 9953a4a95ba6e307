// Two threads that add shares of dQ to those of other tiles of keys, in global memory: each has those of one warpgroup.
// ORDERED, one has both of every other tile of queries, the other those between, so that one waits for its turn while the
// other waits until its own is written.
#pragma once

#include "sm90_backward/work.cuh"

namespace cuflash {

struct Adder {
    const Arguments& a;
    u32 base;
    int mine;      // 0 or 1
    int next = 0;  // ORDERED: whose the next tile is
    u32 parity = 0;
    int cleared = 0;  // the last section that is known to begin with zeros

    __device__ __forceinline__ Adder(const Arguments& arguments, u32 shared, int which)
        : a(arguments), base(shared), mine(which) {}

    // Until the work's section has been set to 0, the first by `prepare`, others by all pieces of work of the section before.
    __device__ __forceinline__ void await_zeros(const Work& work) {
        if (a.sections == 1 || work.section == cleared) return;
        cleared = work.section;
        while (read_acquire(a.counters + FIRST_TURN + cleared) != a.section * a.key_tiles) __nanosleep(32);
        fence_async_global();
    }
    // ORDERED. Tiles of keys that have added to this tile of queries.
    __device__ __forceinline__ u32* counter(i64 place) const { return first_turn(a) + place; }
    // Until all have that come before this one.
    __device__ __forceinline__ void await_turn(i64 place, int turn) const {
        while (read_acquire(counter(place)) != turn) __nanosleep(32);
        fence_async_global();
    }
    __device__ __forceinline__ void pass_turn(i64 place) const {
        wait_stores();
        add_release(counter(place), 1);
    }

    // The share of a warpgroup, or a chunk of it; of a tile they lie one after the other.
    __device__ __forceinline__ void add_share(i64 place, int group, int chunk) const {
        const i64 share = (place * Config::GROUPS + group) * Config::DQ_CHUNKS + chunk;
        barrier_wait(base + Shared::dq_full + 16 * group + (Config::ORDERED ? 8 * mine : 0), parity);
        add_floats(a.sums + share * (Shared::DQ / 4), base + Shared::dq + group * Shared::DQ, Shared::DQ);
        commit_stores();
        wait_stores_read();
        barrier_arrive(base + Shared::dq_empty + 8 * group);
    }
    __device__ __forceinline__ void add(const Work& work, int of_group, int tile) {
        const i64 place = work.place_of(of_group, tile, a);
        if (Config::ORDERED) await_turn(place, work.turn(tile, a));
#pragma unroll 1
        for (int chunk = 0; chunk < Config::DQ_CHUNKS; ++chunk, parity ^= 1) {
#pragma unroll 1
            for (int group = Config::ORDERED ? 0 : mine; group < (Config::ORDERED ? Config::GROUPS : mine + 1); ++group)
                add_share(place, group, chunk);
        }
        if (Config::ORDERED) pass_turn(place);
    }

    __device__ __forceinline__ void run() {
        Works<false> works;
        Work work;
        while (works.next(work, base)) {
            works.release(base);
            await_zeros(work);
            for (int of_group = 0; of_group < a.group; ++of_group) {
#pragma unroll 1
                for (int tile = work.end - 1; tile >= work.begin; --tile, next ^= 1)
                    if (!Config::ORDERED || next == mine) add(work, of_group, tile);
            }
        }
        wait_stores();
    }
};

}  // namespace cuflash
