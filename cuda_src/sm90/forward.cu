// Attention forward for compute capability 9.0: FlashAttention-3 (Shah et al. 2024) in plain CUDA C++.
//
// A block stays on its multiprocessor and takes one piece of work after another: for each of GROUPS warpgroups 64 lines,
// query rows of one head or of several that share keys, and the key tiles that they see, from the last to the first. One
// more warpgroup fetches: a single thread of it finds the work and has it, Q, K and V brought by tensor copies, STAGES
// tiles ahead. Blocks of a cluster take neighbouring rows, walk the same tiles, and fetch half of each for both.
//
// Budget a thread of a multiplying warpgroup, in registers: S = BN / 2, P = BN / 4, O = DV / 2, about 24 beside. Two
// RESIDENT blocks have half each, and room for S and O alone: one's products go on beside the other's softmax.
// Scores live in units of log2: weight = 2^(score * factor - top * factor), where top is within STALE of the row's largest.

#include "sm90/producer.cuh"
#include "sm90/walk16.cuh"
#include "sm90/walk8.cuh"

namespace cuflash {

__device__ __forceinline__ void forward(const Arguments& a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler has to know that a warp has one
    const int rank = Config::CLUSTER > 1 ? int(cluster_rank()) : 0;
    if (threadIdx.x == 0) {
        prefetch_map(a.q), prefetch_map(a.k), prefetch_map(a.v), prefetch_map(a.out);
        for (int i = 0; i < Config::STAGES; ++i) {
            barrier_init(base + Shared::k_full + 8 * i, 1);
            barrier_init(base + Shared::v_full + 8 * i, 1);
            barrier_init(base + Shared::k_empty + 8 * i, Config::GROUPS * Config::CLUSTER);
            barrier_init(base + Shared::v_empty + 8 * i, Config::GROUPS * Config::CLUSTER);
        }
        for (int i = 0; i < Config::GROUPS; ++i) {
            barrier_init(base + Shared::q_full + 8 * i, 1);
            barrier_init(base + Shared::q_empty + 8 * i, 1);
            barrier_init(base + Shared::out_gone + 8 * i, Config::CLUSTER);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(base + Shared::work_full + 8 * i, 1);
            barrier_init(base + Shared::work_empty + 8 * i, 128 * Config::GROUPS);
        }
        barrier_init(base + Shared::first_full, 1);
        barrier_init(base + Shared::first_empty, Config::GROUPS);
        publish_barriers();
    }
    if (Config::CLUSTER > 1)
        meet_cluster();
    else
        __syncthreads();

    await_kernel_before(), let_next_kernel_start();

    if (group == 0) {
        give_registers<Config::PRODUCER_REGISTERS>();
        if (threadIdx.x < 32) {
            if (elected()) produce(base, rank, a);
            __syncwarp();
        }
    } else {
        take_registers<Config::CONSUMER_REGISTERS>();
        Consumer(a, base, group - 1).run();
    }
    if (Config::CLUSTER > 1) meet_cluster();  // no block leaves while the other may still write to it
}

}  // namespace cuflash

#if CONFIG_CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CONFIG_CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(cuflash::Config::THREADS, cuflash::Config::RESIDENT)
    CONFIG_NAME(const __grid_constant__ cuflash::Arguments arguments) {
    cuflash::forward(arguments);
}
