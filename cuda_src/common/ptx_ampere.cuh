// One wrapper, one instruction: asynchronous copies, matrix loads from shared memory, warp matrix products.
#pragma once

namespace cuflash {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned u32;

struct Float16 {};
struct Bfloat16 {};
struct E4m3 {};
struct Int8 {};

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Where the shared memory begins whose size a launch says.
__device__ __forceinline__ u32 dynamic_shared() {
    extern __shared__ __align__(128) unsigned char dynamic_memory[];
    return shared_address(dynamic_memory);
}

// cp.async: 16 bytes from global to shared memory, of which the last 16 - bytes become 0 (bytes: 0 or 16).
// With 0 nothing is read, so that the address may lie anywhere.
__device__ __forceinline__ void copy_async(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// cp.async.wait_all: until every copy has come that this thread has begun.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// mbarrier: a barrier in shared memory, whose phases each take `arrivals`. Who arrives need not wait. Phases alternate in
// parity, the first one's being 0; a wait for the parity of the phase before it returns at once.
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}

// cp.async.mbarrier.arrive: as soon as every copy has come that this thread has begun.
__device__ __forceinline__ void barrier_arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define CUFLASH_WAIT "try_wait"  // sleeps
#else
#define CUFLASH_WAIT "test_wait"
#endif
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier." CUFLASH_WAIT
                 ".parity.shared.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
#undef CUFLASH_WAIT
}

// st.shared.v4.b32
__device__ __forceinline__ void store_unit(u32 shared, const u32 (&from)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(from[0]), "r"(from[1]), "r"(from[2]),
                 "r"(from[3])
                 : "memory");
}

// ld.shared.v4.b32
__device__ __forceinline__ void load_unit(u32 (&to)[4], u32 shared) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// ld.shared.v4.f32, st.shared.v4.f32
__device__ __forceinline__ void load_floats(float& x, float& y, float& z, float& w, u32 shared) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(shared) : "memory");
}
__device__ __forceinline__ void store_floats(u32 shared, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// st.shared.b32
__device__ __forceinline__ void store_pair(u32 shared, u32 from) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(from) : "memory");
}

// red.global.add.f32, of four numbers a lane: the first of every lane, then the second of every lane, and so on. From
// compute capability 9.0 on they lie next to each other, and are one instruction.
__device__ __forceinline__ void add_to_global(float* warps, const float (&of)[4]) {
    const u32 lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(warps + 4 * lane), "f"(of[0]), "f"(of[1]),
                 "f"(of[2]), "f"(of[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e)
        asm volatile("red.global.add.f32 [%0], %1;" ::"l"(warps + 32 * e + lane), "f"(of[e]) : "memory");
#endif
}

// What add_to_global has summed up.
__device__ __forceinline__ void read_sums(float (&to)[4], const float* warps) {
    const u32 lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    const float4 sums = *reinterpret_cast<const float4*>(warps + 4 * lane);
    to[0] = sums.x, to[1] = sums.y, to[2] = sums.z, to[3] = sums.w;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = warps[32 * e + lane];
#endif
}

// bar.sync: two warps that name the same barrier (1 to 15) meet.
__device__ __forceinline__ void pair_sync(int barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

// ldmatrix.x4: four 8x8 matrices of 16-bit elements, lane i giving the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// ldmatrix.x4.trans: the same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared)
                 : "memory");
}

// mma.m16n8k16: sums += a b, a 16x16 row-major, b 16x8 column-major, sums 16x8 in float32.
__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, Float16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, Bfloat16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rn.f16x2.f32: low in the lower half.
__device__ __forceinline__ u32 pack(float low, float high, Float16) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// cvt.rn.bf16x2.f32
__device__ __forceinline__ u32 pack(float low, float high, Bfloat16) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// cvt.f32.f16, of one half of a pair.
__device__ __forceinline__ float low_of(u32 pair, Float16) {
    float x;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(x) : "r"(pair));
    return x;
}

__device__ __forceinline__ float high_of(u32 pair, Float16) {
    float x;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}" : "=f"(x) : "r"(pair));
    return x;
}

__device__ __forceinline__ float low_of(u32 pair, Bfloat16) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair, Bfloat16) { return __int_as_float(pair & 0xffff0000); }

// cvt.rn.satfinite.e4m3x2.f32, twice: first in the lowest byte. Of compute capability 8.9 and newer.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 pack(float first, float second, float third, float fourth, E4m3) {
    u32 codes;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(codes)
        : "f"(first), "f"(second), "f"(third), "f"(fourth));
    return codes;
}
#endif

// ex2.approx.ftz.f32
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// NVRTC has no <cmath>.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

}  // namespace cuflash
