// One wrapper, one instruction of compute capability 9.0: barriers in shared memory, bulk tensor copies, warpgroup products.
#pragma once

#include "common/ptx_ampere.cuh"

namespace cuflash {

// 128 bytes that the driver made; kernels pass its address on.
struct __align__(64) TensorMap {
    u64 opaque[16];
};

// griddepcontrol: a kernel that is launched early waits for all that the kernel before it wrote; that one lets it start.
__device__ __forceinline__ void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// fence.mbarrier_init: makes barriers known to asynchronous copies and to the cluster.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.test_wait: whether the phase of that parity is over, as 1 or 0; does not wait.
__device__ __forceinline__ u32 barrier_test(u32 barrier, u32 parity) {
    u32 is_over;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(is_over)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return is_over;
}
// barrier_wait, where a test has not told yet that the phase is over.
__device__ __forceinline__ void barrier_wait_unless(u32 is_over, u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nsetp.ne.u32 done, %0, 0;\n@done bra over;\n"
        "again:\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n@!done bra again;\nover:\n}" ::"r"(is_over),
        "r"(barrier), "r"(parity)
        : "memory");
}

// mbarrier.arrive.expect_tx: a phase ends once all bytes expected have come, too.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.arrive at the same place in another block of the cluster. Without .release.cluster, which would fence all memory
// of the GPU at each arrival: what these barriers guard is read and written by tensor copies and products alone.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// cp.async.bulk.tensor: a box at (column, head, row, entry) into shared memory, its bytes counted by the barrier.
__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, u32 barrier, int column, int head, int row, int entry) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
            to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(entry)
        : "memory");
}

// The same into both blocks of a pair, at the same place of each.
__device__ __forceinline__ void load_box_for_pair(u32 to, const TensorMap& map, u32 barrier, int column, int head, int row,
                                                  int entry) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(entry), "h"(u16(3))
        : "memory");
}

// A box from shared memory; what lies beyond the tensor is dropped.
__device__ __forceinline__ void store_box(const TensorMap& map, u32 from, int column, int head, int row, int entry) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map), "r"(from),
                 "r"(column), "r"(head), "r"(row), "r"(entry)
                 : "memory");
}
// cp.async.bulk: neighbouring bytes, a multiple of 16, into shared memory.
__device__ __forceinline__ void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// cp.async.bulk: neighbouring bytes of shared memory, a multiple of 16, to global memory.
__device__ __forceinline__ void store_bytes(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

// cp.reduce.async.bulk: neighbouring floats of shared memory are added to as many in global memory.
__device__ __forceinline__ void add_floats(float* to, u32 from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores have read their source / have been written, but for the LATER last groups.
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int LATER = 0>
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LATER) : "memory");
}

// What threads have written to shared memory becomes visible to tensor copies and products.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Of global memory: bulk copies after it come after what this thread knows to be there. Their completion needs none.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Around warpgroup products: registers written before are ready; a batch ends; at most PENDING batches still run.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// setmaxnreg: registers of a thread of this warpgroup from here on.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// bar.sync and bar.arrive on named barrier `id`, of which `threads` take part.
__device__ __forceinline__ void meet(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void announce(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// elect.sync: one lane of a whole warp.
__device__ __forceinline__ bool elected() {
    u32 is;
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(is));
    return is != 0;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// stmatrix.x4: four 8x8 matrices of 16-bit elements, lane i giving the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(u32 shared, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(from[0]), "r"(from[1]),
                 "r"(from[2]), "r"(from[3])
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(u32 shared, const u32 (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

}  // namespace cuflash
