// Attention backward for compute capability 8.0 and newer: FlashAttention-2 (Dao 2023, algorithm 2) on mma.sync.
//
// Three kernels. The first goes through rows: LSE in the units of exp2, sum(dout * out), sums of dQ cleared. In the main one
// a block owns BN keys of a KV head, and goes through the query tiles, of M rows, of every head of its group, in order:
//
//   S^T  = K Q^T       P^T  = 2^(S^T * factor - lse)      kept in shared memory, 16 bits
//   dP^T = V dO^T      dS^T = P^T * (dP^T - delta)        kept in shared memory, 16 bits
//   dV  += P^T dO      dK  += dS^T Q                      in registers, to the end
//   dQ   = dS K                                           added to float32 sums in memory, where the third kernel rounds them
//
// so that dK and dV need no atomics, whatever the group. Warps form a grid, KEY_GROUPS x SIDES: for S and dP a warp has KEYS
// x QUERIES scores, for dK and dV its keys and a part of the columns; for dQ QUERY_GROUPS x DQ_SIDES. Operands come from
// shared memory, whose bandwidth is what bounds the kernel: of d=128, 64 x 64, four warps, each reads 136 times 512 bytes
// for its 320 products of m16n8k16.
//
// The next dO is loaded while dK and dQ are computed; the next Q, where there are two stages, all the while. Two blocks of a
// multiprocessor hide each other's waits.
//
// Blocks add to dQ in any order, or where the same bits are wanted in turn (backward_order.cuh).
//
// Budget a thread, in registers:  dK, dV = KEYS * (D + DV) / (32 * SIDES),  S, dP = KEYS * QUERIES / 16,  dQ, while those of S
//                                 and dP are free, = M * D / THREADS,  about 50 beside; 255 at most.
// Shared memory, in bytes:        2 * (BN * (D + DV) + M * (STAGES * D + DV) + 2 * BN * M) + 8 * STAGES * M, D, DV and M
//                                 rounded up to 64 columns.

#include "sm80/backward_keys.cuh"
#include "sm80/backward_rows.cuh"

extern "C" __global__ void __launch_bounds__(cuflash::ROW_THREADS) CONFIG_PREPARE(const cuflash::Arguments arguments) {
    cuflash::prepare_rows(arguments);
}

extern "C" __global__ void __launch_bounds__(cuflash::Config::THREADS, cuflash::Config::BLOCKS)
    CONFIG_NAME(const cuflash::Arguments arguments) {
    cuflash::go_through_keys(arguments);
}

extern "C" __global__ void __launch_bounds__(cuflash::Config::THREADS) CONFIG_FINISH(const cuflash::Arguments arguments) {
    cuflash::finish_rows(arguments);
}
