// Q, K and V of 16 bits to 8: statistics per channel, an exact transform, scales, rounding; V with channels as rows, as
// products of 8 bits take it.
//
// What attention does not see is taken out before rounding: K loses its mean (SageAttention, Zhang et al. 2024, section
// 4.2), Q is multiplied and K divided by a factor per channel (after SmoothQuant, Xiao et al. 2022), both are rotated
// (FlashAttention-3, Shah et al. 2024, section 3.3), and V's mean is added to the result again.
//
// All of it is to take as long as its bytes do: V is read twice, Q and K once and samples of them, and the codes are written
// once. `statistics` reads chunks of rows, `summary` makes of those what a head's channels need, and `codes` has blocks that
// stay on their multiprocessor, take one tile after another, and have the next one's bytes under way meanwhile. Each starts
// while the one before ends, so that nothing lies between them.

#include "fp8/rows.cuh"
#include "fp8/statistics.cuh"
#include "fp8/values.cuh"

namespace cuflash {

__device__ __forceinline__ void quantize(const Arguments& a) {
    extern __shared__ __align__(16) unsigned char shared[];
    Stage* stages = reinterpret_cast<Stage*>(shared);
    // What this turn's tile is of, and the next two's: found by one thread a turn before the others ask for its rows, since it
    // takes divisions. Not in registers, of which rows need all.
    __shared__ Work works[4];
    const int tiles = tiles_of(a), step = gridDim.x;
    auto find = [&](int turn, int index) {
        if (index < tiles) works[turn % 4] = work_of(a, index);
    };
    if (threadIdx.x < 2) find(threadIdx.x, blockIdx.x + threadIdx.x * step);
    __syncthreads();
    begin_rows(stages[0], works[0], a);
    await_kernel_before();  // it makes the factors, not the rows
    begin_factors(stages[0], works[0], a);
    int turn = 0;
    for (int index = blockIdx.x; index < tiles; index += step, ++turn) {
        const int now = turn % 2;
        wait_copies();
        __syncthreads();  // all have their copies, and none is at the tile before
        if (index + step < tiles) {
            const Work& next = works[(turn + 1) % 4];
            begin_rows(stages[now ^ 1], next, a);
            begin_factors(stages[now ^ 1], next, a);
        }
        if (threadIdx.x == THREADS - 1) find(turn + 2, index + 2 * step);
        const Work& work = works[turn % 4];
        if (work.role == VALUES)
            quantize_values(stages[now], work, a);
        else if (work.role == KEYS)
            quantize_rows<true>(stages[now], work, a);
        else
            quantize_rows<false>(stages[now], work, a);
    }
}

}  // namespace cuflash

using cuflash::Arguments;
extern "C" {
__global__ void __launch_bounds__(cuflash::CHUNK_THREADS, cuflash::CHUNKS_AT_ONCE)
    cuflash_fp8_statistics(const __grid_constant__ Arguments a) {
    // In this order: codes read q, k and v before they wait, and may start once this kernel has.
    cuflash::await_kernel_before(), cuflash::let_next_kernel_start();
    cuflash::take_statistics(a);
}
// One block of a multiprocessor, or ptxas saves registers and has loads wait for each other.
__global__ void __launch_bounds__(cuflash::SUMMARY_THREADS, 1) cuflash_fp8_summary(const __grid_constant__ Arguments a) {
    cuflash::let_next_kernel_start();
    cuflash::summarise(a);
}
__global__ void __launch_bounds__(CONFIG_THREADS, CONFIG_RESIDENT) cuflash_fp8_codes(const __grid_constant__ Arguments a) {
    cuflash::let_next_kernel_start();
    cuflash::quantize(a);
}
}
