// What the kernels of `quantize.cu` are given, and the numbers that they share.
#pragma once

#include "common/ptx_hopper.cuh"

namespace cuflash {

constexpr int D = CONFIG_HEAD_DIM;  // bucket; channels from a.dim on are 0
constexpr int MIXED = CONFIG_MIXED;  // channels that are rotated together, a power of two; 1 for none
constexpr int UNITS = D / 8;        // of 8 channels, 16 bytes
constexpr int TILE = CONFIG_TILE;   // rows of Q or K, or keys of V, that a block takes at once: 128, or 64
constexpr int FIRST = 128;          // keys whose values are kept
constexpr int CHUNK = 256;          // rows of a block of `statistics`
constexpr int RUN = 16, FEWEST = 2048;  // of a sample, as in fp8/sample.py

// Records of partial statistics, D numbers each.
constexpr int Q_RECORDS = 1;  // sum of squares
constexpr int K_RECORDS = 2;  // sum and sum of squares, of differences from the head's first row
constexpr int V_RECORDS = 3;  // sum, most, most of the negated

enum Sharing { TOKEN, COLUMNS, BLOCK_64, BLOCK_128 };  // which rows have one scale
constexpr float LARGEST_QK = CONFIG_LARGEST, LARGEST_V = 448.f;

struct Input {
    const void* data;
    i64 batch, head, row;  // steps in elements
};

struct Arguments {
    Input q, k, v;
    const i64* q_lens;   // or null
    const i64* kv_lens;  // or null
    float* q_partial;    // (entries, q_heads, q_chunks, Q_RECORDS, D)
    float* k_partial;    // (entries, kv_heads, k_chunks, K_RECORDS, D)
    float* v_partial;    // (entries, kv_heads, v_chunks, V_RECORDS, D)
    u32* value_tiles;    // (entries, kv_heads): whose codes are there
    i64* code_sums;      // (entries, kv_heads, D): of V's codes, in units of 2^-9, in which no order matters
    float* k_means;      // (entries, kv_heads, D); 0 where it stays
    float* q_factors;    // (entries, kv_heads, D): balance, sign and the rotation's norm in one
    float* k_factors;    // (entries, kv_heads, D): the same with the inverse of balance
    float* v_means;      // (entries, kv_heads, D): what is added to out
    float* v_scales;     // (entries, kv_heads, D)
    unsigned char* q_codes;  // (entries, q_heads, q_len, D)
    unsigned char* k_codes;  // (entries, kv_heads, kv_len, D)
    unsigned char* v_codes;  // (entries, kv_heads, D, key_blocks * 64), 16 keys in the order of `quantize_values`
    float* q_scales;     // (entries, q_heads, q_len)
    float* k_scales;     // (entries, kv_heads, key_blocks, 4)
    float* lse_shifts;   // (entries, q_heads, q_len): products of rows with the mean of K; or null
    u16* first_values;   // (entries, kv_heads, FIRST, D), of the first keys: V less v_means, in units of v_scales, in float16
    const float* signs;  // (1 or kv_heads, D); or null
    int entries, q_heads, kv_heads, group, q_len, kv_len, dim, q_chunks, k_chunks, v_chunks, key_blocks;
    int q_sharing, k_sharing;
    int center_k, center_v, balanced, signs_per_head, residual_mean, keep_first;  // whether
    int zeros;            // of 16 bytes, from `value_tiles` on, which begin as 0
    float root;   // 1 / sqrt(MIXED)
};
static_assert(sizeof(Arguments) == 344, "the fields and sizes in fp8/gpu_quantizer.py");

__device__ __forceinline__ int used(const i64* lens, int entry, int capacity) {
    if (lens == nullptr) return capacity;
    const i64 length = lens[entry];
    return length < 0 ? 0 : length > capacity ? capacity : int(length);
}

__device__ __forceinline__ const u16* row_of(const Input& from, int entry, int head, int row) {
    return static_cast<const u16*>(from.data) + entry * from.batch + head * from.head + row * from.row;
}

__device__ __forceinline__ void to_floats(float (&to)[8], const uint4& unit) {
    const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[2 * i] = low_of(pairs[i], CONFIG_ELEMENT()), to[2 * i + 1] = high_of(pairs[i], CONFIG_ELEMENT());
}

// createpolicy, ld.global.nc: 16 bytes that the L2 cache keeps no longer than it has to.
__device__ __forceinline__ uint4 load_leaving(const void* from) {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    uint4 unit;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
                 : "l"(from), "l"(policy));
    return unit;
}

// max.NaN.xorsign.abs.f32: the larger size, with any sign; NaN where one is.
__device__ __forceinline__ float larger(float x, float y) {
    float most;
    asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

// Of a group whose largest size is given: its scale. Groups of zeros have 0; NaN tells of NaN or Inf.
__device__ __forceinline__ float scale_for(float size, float largest_code) {
    if (!is_finite(size)) return __int_as_float(0x7fc00000);
    return size < 1e-30f ? 0.f : __fdiv_rn(size, largest_code);
}

// 0 where all codes are 0: in groups of zeros, and with NaN or Inf.
__device__ __forceinline__ float inverse_of(float scale) { return scale > 0.f ? __frcp_rn(scale) : 0.f; }

}  // namespace cuflash
