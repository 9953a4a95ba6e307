// Attention backward for compute capability 9.0: FlashAttention-3's way (Shah et al. 2024) in plain CUDA C++.
//
// A block stays on its multiprocessor and takes one piece of work after another: a tile of keys of one head, and the tiles of
// queries that see it, of all heads that share the keys. K and V stay in shared memory, dK and dV in registers:
//   Sᵀ = K Qᵀ, P = 2^(S factor - LSE), dPᵀ = V dOᵀ, dS = P (dP - delta), dV += Pᵀ dO, dK += dSᵀ Q, dQ += dS K.
// Lines of products are keys, so that Pᵀ and dSᵀ are in the registers that the next product takes them from. dQ is added up
// in global memory in float32, which `prepare` clears before, and other blocks of this kernel, and `finish` rounds after
// (rows.cuh). Pieces of work that would leave most blocks idle at the end are split along their queries; the part that ends
// last adds up what all have found of dK and dV.
//
// Warpgroup 0, a thread of each warp: one finds work and fetches Q and dO, one K and V, two hand shares of dQ to the copy
// engine. Two warpgroups multiply.
// Budget of a thread of those: S and dP BM / 2 each, dK D / 2, dV DV / 2, and 24 to 45 beside; dQ where S and dP were.

#include "sm90_backward/adder.cuh"
#include "sm90_backward/producer.cuh"
#include "sm90_backward/rows.cuh"
#include "sm90_backward/walk.cuh"
#include "sm90_backward/walk_parted.cuh"

namespace cuflash {

__device__ __forceinline__ void backward(const Arguments& a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the compiler has to know that a warp has one
    if (threadIdx.x == 0) {
        // Of those that multiply, each thread tells that it has read row statistics, which come with Q, or a record of work,
        // and each warp that its products have read tiles.
        constexpr int THREADS = 128 * Config::GROUPS, WARPS = THREADS / 32;
        for (int i = 0; i < Config::Q_STAGES; ++i) {
            barrier_init(base + Shared::q_full + 8 * i, 1);
            barrier_init(base + Shared::q_empty + 8 * i, THREADS);
        }
        for (int i = 0; i < Config::O_STAGES; ++i) {
            barrier_init(base + Shared::o_full + 8 * i, 1);
            barrier_init(base + Shared::o_empty + 8 * i, WARPS);
        }
        for (int i = 0; i < 2 * Config::GROUPS; ++i) barrier_init(base + Shared::dq_full + 8 * i, 4);  // a thread of each warp
        for (int i = 0; i < Config::GROUPS; ++i) barrier_init(base + Shared::dq_empty + 8 * i, 1);
        barrier_init(base + Shared::k_full, 1), barrier_init(base + Shared::v_full, 1);
        barrier_init(base + Shared::kv_empty, WARPS);
        barrier_init(base + Shared::weights_full, 128), barrier_init(base + Shared::weights_empty, 128);
        barrier_init(base + Shared::scores_full, 128), barrier_init(base + Shared::all, THREADS);
        for (int i = 0; i < 2; ++i) {
            barrier_init(base + Shared::work_full + 8 * i, 1);
            barrier_init(base + Shared::work_empty + 8 * i, THREADS + 3);  // and adders, keys' producer
        }
        publish_barriers();
    }
    const u32 zeros[4] = {};
    if (threadIdx.x < Shared::ZEROS / 16) store_unit(base + Shared::zeros + 16 * threadIdx.x, zeros);
    fence_async();
    __syncthreads();
    await_kernel_before(), let_next_kernel_start();

    if (group == 0) {
        give_registers<Config::PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp == 0) {
            if (elected()) {
                prefetch_map(a.q), prefetch_map(a.dout);
                QueryProducer(a, base).run();
            }
        } else if (warp == 1) {
            if (elected()) {
                prefetch_map(a.k), prefetch_map(a.v);
                KeyProducer(a, base).run();
            }
        } else {
            if (elected()) Adder(a, base, warp - 2).run();
        }
        __syncwarp();
    } else {
        take_registers<Config::CONSUMER_REGISTERS>();
        Consumer(a, base, group - 1).run();
    }
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::THREADS, 1)
    CONFIG_NAME(const __grid_constant__ cuflash::Arguments arguments) {
    cuflash::backward(arguments);
}

extern "C" __global__ void __launch_bounds__(cuflash::ROWS_THREADS)
    cuflash_bwd_prepare(const __grid_constant__ cuflash::Arguments arguments) {
    cuflash::prepare_rows(arguments);
}

extern "C" __global__ void __launch_bounds__(cuflash::ROWS_THREADS)
    cuflash_bwd_finish(const __grid_constant__ cuflash::Arguments arguments) {
    cuflash::finish_rows(arguments);
}
