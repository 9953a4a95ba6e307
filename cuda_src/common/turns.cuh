// Turns, in which blocks of a kernel add to the same sums in global memory one after the other, for the same bits run after
// run. A counter of each part of the sums says how many have added to it; counters are 0 before the kernel.
#pragma once

#include "common/ptx_counters.cuh"

namespace cuflash {

constexpr int FIRST_TURN = 32;  // counters before those of turns, of which the first counts tickets, the second nothing

// A warp's turn at a part of the sums that it alone of its block adds to, by red instructions. Those happen in the L2 cache,
// after the counter has come that they are held back for: its read has nothing to acquire.
struct WarpTurn {
    u32 place = 1;  // of the counter; at first of the one that nobody waits for
    u32 passed;

    // Begins to read the counter; `await` may find that the turn has come by then.
    __device__ __forceinline__ void look(const u32* counters, u32 at) {
        place = at;
        passed = read_relaxed(counters + place);
    }
    // Until as many have added to it.
    __device__ __forceinline__ void await(const u32* counters, u32 turn) {
        while (passed != turn) {
            __nanosleep(32);
            passed = read_relaxed(counters + place);
        }
    }
    // Waits until what the warp has added is there, which takes less the later it is called.
    __device__ __forceinline__ void pass(u32* counters) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) add_release(counters + place, 1);
    }
};

}  // namespace cuflash
