// Slots of shared memory that are filled and emptied in turn.
#pragma once

#include "common/ptx_ampere.cuh"

namespace cuflash {

// A place in a ring of COUNT slots, and the parity of its round.
template <int COUNT>
struct Place {
    int slot = 0;
    u32 parity;
    __device__ __forceinline__ explicit Place(u32 first_parity) : parity(first_parity) {}
    __device__ __forceinline__ void next() {
        if (++slot == COUNT) slot = 0, parity ^= 1;
    }
};

}  // namespace cuflash
