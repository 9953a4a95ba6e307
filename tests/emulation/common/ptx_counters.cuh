// Stands for the header of that name. Blocks run one after another, so that a block that has to wait for a counter waits
// for a block after it.
#pragma once

#include "common/ptx_ampere.cuh"

inline void __nanosleep(unsigned) { emulated::fail("a block waits for one that has not started"); }
inline unsigned atomicAdd(unsigned* counter, unsigned value) {
    const unsigned before = *counter;
    *counter += value;
    return before;
}

namespace cuflash {

inline u32 read_relaxed(const u32* counter) { return *counter; }
inline void add_release(u32* counter, u32 value) {
    for (int lane = emulated::current->index / 32 * 32, i = 0; i < 32; ++i)
        if (emulated::threads[lane + i].additions != emulated::current->additions)
            emulated::fail("a turn is passed before all lanes have added");
    *counter += value;
}

}  // namespace cuflash
