// One wrapper, one instruction: counters in global memory by which blocks of a kernel wait for each other.
#pragma once

#include "common/ptx_ampere.cuh"

namespace cuflash {

// ld.relaxed.gpu: from the L2 cache.
__device__ __forceinline__ u32 read_relaxed(const u32* counter) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// ld.acquire.gpu and red.release.gpu: what was written before an addition is there after a read that sees it.
__device__ __forceinline__ u32 read_acquire(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
__device__ __forceinline__ void add_release(u32* counter, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

}  // namespace cuflash
