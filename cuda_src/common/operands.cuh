// Operands of warpgroup products in shared memory: descriptors of a low word with the address, which is all that moves, and
// a constant high word (PTX ISA, matrix descriptors of wgmma).
#pragma once

#include "common/ptx_hopper.cuh"

namespace cuflash {

// 8 rows to the next 8; swizzled as rows of so many bytes are.
__device__ __forceinline__ constexpr u64 descriptor(int row) {
    return u64((8 * row >> 4) | (row == 128 ? 1 : 2) << 30) << 32;
}

// `leading_bytes`: from panel to panel of an operand that lies transposed, else 16.
__device__ __forceinline__ u32 low_word(u32 address, u32 leading_bytes) {
    return ((address & 0x3ffff) >> 4) | (leading_bytes >> 4) << 16;
}

// Words to add for step `step` of 32 bytes, in panels of `rows` rows of `row` bytes.
__device__ __forceinline__ constexpr u32 column_step(int step, int rows, int row) {
    const int steps = row / 32;
    return (step / steps * rows * row + step % steps * 32) >> 4;
}

// The same for step `step` of 16 rows, of an operand that lies transposed.
__device__ __forceinline__ constexpr u32 row_step(int step, int row) { return step * 16 * row >> 4; }

}  // namespace cuflash
