// Q, K and V of 16 bits to 8: statistics per channel, an exact transform, scales, rounding; V with channels as rows, as products
// of 8 bits take it.
//
// What attention does not see is taken out before rounding: K loses its mean (SageAttention, Zhang et al. 2024, section 4.2), Q
// is multiplied and K divided by a factor per channel (after SmoothQuant, Xiao et al. 2022), both are rotated
// (FlashAttention-3, Shah et al. 2024, section 3.3), and V's mean is added to the result again.
//
// Four kernels: `statistics` of chunks of tokens, `summary` of those, `rows` for Q and K, `values` for V. Sums go in one order.

#include "common/ptx_ampere.cuh"

namespace cuflash {

constexpr int D = CONFIG_HEAD_DIM;  // bucket; channels from a.dim on are 0
constexpr int THREADS = 256;
constexpr int UNITS = D / 8;           // of 8 channels, 16 bytes
constexpr int LANES = D / 32;          // that share a row, each with 32 channels
constexpr int TILE = 128;              // rows of Q or K for a block
constexpr int PASSES = TILE * LANES / THREADS;  // rows of a thread
constexpr int KEYS = 64;               // of V for a block
constexpr int CHUNK = 256;             // tokens of a block of `statistics`
enum Statistic { K_SUM, K_SQUARES, V_SUM, V_LEAST, V_MOST, Q_SQUARES, STATISTICS };
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
    float* partial;      // (entries * kv_heads, chunks, STATISTICS, D)
    float* k_mean;       // (entries, kv_heads, D); 0 where it stays
    float* balance;      // (entries, kv_heads, D); 1 where there is none
    float* v_means;       // (entries, kv_heads, D); 0 where it stays
    float* v_scales;     // (entries, kv_heads, D)
    const float* signs;  // (1 or kv_heads, D); or null
    unsigned char* q_codes;  // (entries, q_heads, q_len, D)
    unsigned char* k_codes;  // (entries, kv_heads, kv_len, D)
    unsigned char* v_codes;  // (entries, kv_heads, D, key_blocks * 64), keys in the order of PLACE
    float* q_scales;     // (entries, q_heads, q_len)
    float* k_scales;     // (entries, kv_heads, key_blocks, 4)
    float* lse_shifts;   // (entries, q_heads, q_len); or null
    float* residual;     // (entries * kv_heads, key_blocks, D): sums of V's rounding errors; or null
    int q_heads, kv_heads, q_len, kv_len, dim, chunks, key_blocks;
    int q_sharing, k_sharing;
    int center_k, center_v, balanced, signs_per_head;  // whether
    int mixed;    // channels that are rotated together, a power of two; 1 for none
    float root;   // 1 / sqrt(mixed)
    float scale;  // of attention, for lse_shifts
};
static_assert(sizeof(Arguments) == 280, "the fields and sizes in fp8/gpu_quantizer.py");

__device__ __forceinline__ int used(const i64* lens, int entry, int capacity) {
    if (lens == nullptr) return capacity;
    const i64 length = lens[entry];
    return length < 0 ? 0 : length > capacity ? capacity : int(length);
}

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

// 8 channels of a row, from channel `at` on; those past the dim are 0.
__device__ __forceinline__ void load_channels(float (&to)[8], const Input& from, int entry, int head, int row, int at, int dim) {
    uint4 unit = make_uint4(0, 0, 0, 0);
    if (at < dim)  // dims are multiples of 8
        unit = __ldg(reinterpret_cast<const uint4*>(static_cast<const u16*>(from.data) + entry * from.batch + head * from.head +
                                                    row * from.row + at));
    const u32 pairs[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        to[2 * i] = low_of(pairs[i], CONFIG_ELEMENT()), to[2 * i + 1] = high_of(pairs[i], CONFIG_ELEMENT());
}

// Bits of the largest absolute value: of numbers not below 0 bits compare as they do, and NaN's are above all.
__device__ __forceinline__ int size_of(float x) { return __float_as_int(x) & 0x7fffffff; }
__device__ __forceinline__ bool is_finite(int size) { return size < 0x7f800000; }

// Of a group whose largest size is given: its scale, and the inverse. Groups of zeros have 0; NaN tells of NaN or Inf.
__device__ __forceinline__ float scale_for(int size, float largest_code, float& inverse) {
    const float most = __int_as_float(size);
    inverse = 0.f;
    if (!is_finite(size)) return __int_as_float(0x7fc00000);
    if (most < 1e-30f) return 0.f;
    const float scale = __fdiv_rn(most, largest_code);
    inverse = __frcp_rn(scale);
    return scale;
}

// cvt.rn.f16x2.e4m3x2 and on to floats.
__device__ __forceinline__ float2 decode(u16 codes) {
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return make_float2(low_of(pair, Float16()), high_of(pair, Float16()));
}

__device__ __forceinline__ u32 encode(float a, float b, float c, float d, E4m3) { return pack(a, b, c, d, E4m3()); }
__device__ __forceinline__ u32 encode(float a, float b, float c, float d, Int8) {
    auto round = [](float x) {
        int code;
        asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(fmaxf(x, -127.f)));
        return u32(code) & 255;
    };
    return round(a) | round(b) << 8 | round(c) << 16 | round(d) << 24;
}

// Where a group's 16 keys lie: as the weights of a thread of four come, columns 2 t, 2 t + 1, 8 + 2 t, 9 + 2 t.
__device__ __forceinline__ constexpr int key_at(int place) { return place % 4 / 2 * 8 + place / 4 * 2 + place % 2; }

// Statistics of a chunk of tokens, of K and V of a head and of Q of the heads that share them. Of K as differences from the
// first row, so that a mean far from 0 costs no digits.
__device__ __forceinline__ void take_statistics(const Arguments& a) {
    constexpr int ROWS = THREADS / UNITS;
    __shared__ float part[ROWS][D];
    const int chunk = blockIdx.x % a.chunks, head_of_all = blockIdx.x / a.chunks;
    const int entry = head_of_all / a.kv_heads, kv_head = head_of_all % a.kv_heads, group = a.q_heads / a.kv_heads;
    const int unit = threadIdx.x % UNITS, first = chunk * CHUNK + threadIdx.x / UNITS;
    const int keys = used(a.kv_lens, entry, a.kv_len), queries = used(a.q_lens, entry, a.q_len);
    const int key_end = min(keys, (chunk + 1) * CHUNK), query_end = min(queries, (chunk + 1) * CHUNK);
    float* to = a.partial + i64(blockIdx.x) * STATISTICS * D;

    auto store = [&](Statistic which, const float(&values)[8], auto join) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) part[threadIdx.x / UNITS][unit * 8 + i] = values[i];
        __syncthreads();
        if (threadIdx.x < D) {
            float all = part[0][threadIdx.x];
            for (int row = 1; row < ROWS; ++row) all = join(all, part[row][threadIdx.x]);
            to[which * D + threadIdx.x] = all;
        }
    };
    auto plus = [](float x, float y) { return x + y; };

    float x[8], sum[8] = {}, squares[8] = {}, start[8] = {};
    if (keys > 0) load_channels(start, a.k, entry, kv_head, 0, unit * 8, a.dim);
    for (int row = first; row < key_end; row += ROWS) {
        load_channels(x, a.k, entry, kv_head, row, unit * 8, a.dim);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] -= start[i], sum[i] += x[i], squares[i] += x[i] * x[i];
    }
    store(K_SUM, sum, plus), store(K_SQUARES, squares, plus);

    float least[8], most[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.f, least[i] = __int_as_float(0x7f800000), most[i] = -least[i];
    for (int row = first; row < key_end; row += ROWS) {
        load_channels(x, a.v, entry, kv_head, row, unit * 8, a.dim);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i], least[i] = fminf(least[i], x[i]), most[i] = fmaxf(most[i], x[i]);
    }
    store(V_SUM, sum, plus);
    store(V_LEAST, least, [](float one, float other) { return fminf(one, other); });
    store(V_MOST, most, [](float one, float other) { return fmaxf(one, other); });

#pragma unroll
    for (int i = 0; i < 8; ++i) squares[i] = 0.f;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (int row = first; row < query_end; row += ROWS) {
            load_channels(x, a.q, entry, head, row, unit * 8, a.dim);
#pragma unroll
            for (int i = 0; i < 8; ++i) squares[i] += x[i] * x[i];
        }
    store(Q_SQUARES, squares, plus);
}

// Means, factors and V's scales of a head; a thread a channel.
__device__ __forceinline__ void summarise(const Arguments& a) {
    const int channel = threadIdx.x, entry = blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads;
    float sum[STATISTICS] = {};
    sum[V_LEAST] = __int_as_float(0x7f800000), sum[V_MOST] = -sum[V_LEAST];
    for (int chunk = 0; chunk < a.chunks; ++chunk) {
        const float* from = a.partial + (i64(blockIdx.x) * a.chunks + chunk) * STATISTICS * D + channel;
        for (int which : {K_SUM, K_SQUARES, V_SUM, Q_SQUARES}) sum[which] += from[which * D];
        sum[V_LEAST] = fminf(sum[V_LEAST], from[V_LEAST * D]), sum[V_MOST] = fmaxf(sum[V_MOST], from[V_MOST * D]);
    }
    const float keys = max(used(a.kv_lens, entry, a.kv_len), 1);
    const float queries = float(max(used(a.q_lens, entry, a.q_len), 1)) * (a.q_heads / a.kv_heads);
    float start[8];
    load_channels(start, a.k, entry, kv_head, 0, channel / 8 * 8, used(a.kv_lens, entry, a.kv_len) > 0 ? a.dim : 0);
    float first = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) first = channel % 8 == i ? start[i] : first;
    const float moved = sum[K_SUM] / keys, k_mean = first + moved;
    const i64 at = i64(blockIdx.x) * D + channel;
    a.k_mean[at] = a.center_k ? k_mean : 0.f;

    const float variance = fmaxf(sum[K_SQUARES] / keys - moved * moved, 0.f);
    const float k_size = a.center_k ? variance : variance + k_mean * k_mean, q_size = sum[Q_SQUARES] / queries;
    float factor = 1.f;
    if (a.balanced && k_size > 0.f && q_size > 0.f && is_finite(size_of(k_size)) && is_finite(size_of(q_size)))
        factor = fminf(fmaxf(sqrtf(sqrtf(k_size / q_size)), 1.f / 256.f), 256.f);
    a.balance[at] = factor;

    const float v_mean = a.center_v ? sum[V_SUM] / keys : 0.f;
    int size = max(size_of(sum[V_MOST] - v_mean), size_of(sum[V_LEAST] - v_mean));
    if (used(a.kv_lens, entry, a.kv_len) == 0) size = 0;
    if (!is_finite(size_of(sum[V_SUM]))) size = 0x7fc00000;  // of NaN, which least and most leave out
    float inverse;
    a.v_means[at] = v_mean, a.v_scales[at] = scale_for(size, LARGEST_V, inverse);
}

// A tile of rows of Q or of K.
template <bool OF_K>
__device__ __forceinline__ void quantize_rows(const Arguments& a) {
    __shared__ int sizes[4];
    const int heads = OF_K ? a.kv_heads : a.q_heads, length = OF_K ? a.kv_len : a.q_len;
    const int tiles = OF_K ? a.key_blocks / 2 : (a.q_len + TILE - 1) / TILE;
    const int tile = blockIdx.x % tiles, head_of_all = blockIdx.x / tiles;
    const int entry = head_of_all / heads, head = head_of_all % heads, kv_head = OF_K ? head : head / (a.q_heads / a.kv_heads);
    const int end = used(OF_K ? a.kv_lens : a.q_lens, entry, length);
    const int lane = threadIdx.x % LANES, sharing = OF_K ? a.k_sharing : a.q_sharing;
    const i64 of_head = (i64(entry) * a.kv_heads + kv_head) * D;
    auto row_in_tile = [&](int pass) { return pass * (THREADS / LANES) + int(threadIdx.x) / LANES; };
    auto channel = [&](int chunk) { return (chunk * LANES + lane) * 8; };
    if (threadIdx.x < 4) sizes[threadIdx.x] = 0;
    __syncthreads();

    float x[PASSES][32];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = tile * TILE + row_in_tile(pass);
        float shift = 0.f;
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
            float eight[8] = {};
            if (row < end) load_channels(eight, OF_K ? a.k : a.q, entry, head, row, channel(chunk), a.dim);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int at = channel(chunk) + i;
                const float mean = __ldg(a.k_mean + of_head + at), factor = __ldg(a.balance + of_head + at);
                float& value = x[pass][8 * chunk + i];
                if (OF_K) {
                    value = row < end ? __fdiv_rn(eight[i] - mean, factor) : 0.f;
                } else {
                    shift += eight[i] * mean;
                    value = eight[i] * factor;
                }
                if (a.signs != nullptr) value *= __ldg(a.signs + (a.signs_per_head ? kv_head * D : 0) + at);
            }
        }
        if (!OF_K && a.lse_shifts != nullptr) {
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) shift += __shfl_xor_sync(~0u, shift, step);
            if (lane == 0 && row < length) a.lse_shifts[i64(head_of_all) * a.q_len + row] = shift * a.scale;
        }
        // Walsh-Hadamard: channels 8 (lane + LANES chunk) + i, from the lowest bit up.
        if (a.mixed > 1) {
#pragma unroll
            for (int half = 1; half < D; half *= 2) {
                if (half >= a.mixed) continue;
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    if (half < 8 || half >= 8 * LANES) {
                        const int step = half < 8 ? half : half / LANES;
                        if (i & step) continue;
                        const float low = x[pass][i], high = x[pass][i + step];
                        x[pass][i] = low + high, x[pass][i + step] = low - high;
                    } else {
                        const float other = __shfl_xor_sync(~0u, x[pass][i], half / 8);
                        x[pass][i] = lane & half / 8 ? other - x[pass][i] : x[pass][i] + other;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 32; ++i) x[pass][i] *= a.root;
        }
    }

    int size[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        size[pass] = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) size[pass] = max(size[pass], size_of(x[pass][i]));
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) size[pass] = max(size[pass], __shfl_xor_sync(~0u, size[pass], step));
    }
    auto group_of = [&](int row) { return sharing == COLUMNS ? row % 8 / 2 : sharing == BLOCK_64 ? row / 64 : 0; };
    if (sharing != TOKEN) {
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            if (lane == 0) atomicMax(&sizes[group_of(row_in_tile(pass))], size[pass]);
        __syncthreads();
    }
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        const int row = tile * TILE + row_in_tile(pass);
        float inverse;
        const float scale =
            scale_for(sharing == TOKEN ? size[pass] : sizes[group_of(row_in_tile(pass))], LARGEST_QK, inverse);
        if (row >= length) continue;
        if (!OF_K && lane == 0) a.q_scales[i64(head_of_all) * a.q_len + row] = scale;
        unsigned char* to = (OF_K ? a.k_codes : a.q_codes) + (i64(head_of_all) * length + row) * D;
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
            float y[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) y[i] = inverse == 0.f || row >= end ? 0.f : x[pass][8 * chunk + i] * inverse;
            *reinterpret_cast<uint2*>(to + channel(chunk)) = make_uint2(encode(y[0], y[1], y[2], y[3], CONFIG_QK_ELEMENT()),
                                                                        encode(y[4], y[5], y[6], y[7], CONFIG_QK_ELEMENT()));
        }
    }
    if (OF_K && threadIdx.x < 8) {  // of each 64 keys those of each thread of four, whatever shares them
        const int block = threadIdx.x / 4, thread = threadIdx.x % 4;
        float inverse;
        const int size_of_group = sizes[sharing == COLUMNS ? thread : sharing == BLOCK_64 ? block : 0];
        a.k_scales[(i64(head_of_all) * a.key_blocks + tile * 2 + block) * 4 + thread] =
            scale_for(size_of_group, LARGEST_QK, inverse);
    }
}

// 64 keys of V, channels as rows, and the sum of what rounding took from each channel.
__device__ __forceinline__ void quantize_values(const Arguments& a) {
    constexpr int PARTS = THREADS / D, OWN = KEYS / PARTS;  // threads of a channel, keys of each
    __shared__ __align__(16) u16 tile[KEYS][D + 8];
    __shared__ float errors[THREADS];
    const int block = blockIdx.x % a.key_blocks, head_of_all = blockIdx.x / a.key_blocks;
    const int entry = head_of_all / a.kv_heads, head = head_of_all % a.kv_heads;
    const int end = used(a.kv_lens, entry, a.kv_len), first = block * KEYS;
    for (int i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
        const int row = i / UNITS, at = i % UNITS * 8;
        uint4 unit = make_uint4(0, 0, 0, 0);
        if (first + row < end && at < a.dim)
            unit = __ldg(reinterpret_cast<const uint4*>(static_cast<const u16*>(a.v.data) + entry * a.v.batch +
                                                        head * a.v.head + (first + row) * a.v.row + at));
        *reinterpret_cast<uint4*>(&tile[row][at]) = unit;
    }
    __syncthreads();
    const int channel = threadIdx.x % D, part = threadIdx.x / D;
    const i64 at = i64(head_of_all) * D + channel;
    const float mean = a.v_means[at], scale = a.v_scales[at];
    const float inverse = scale > 0.f ? __frcp_rn(scale) : 0.f;  // NaN is not
    float lost = 0.f;
    unsigned char* to = a.v_codes + at * (i64(a.key_blocks) * KEYS) + first + part * OWN;
#pragma unroll
    for (int sixteen = 0; sixteen < OWN / 16; ++sixteen) {
        u32 words[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            float value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = part * OWN + sixteen * 16 + key_at(4 * word + i);
                const float x = low_of(tile[row][channel], CONFIG_ELEMENT()) - mean;
                value[i] = first + row < end ? x : 0.f;
            }
            words[word] = 0;
            if (inverse != 0.f)
                words[word] = pack(value[0] * inverse, value[1] * inverse, value[2] * inverse, value[3] * inverse, E4m3());
            const float2 low = decode(words[word] & 0xffff), high = decode(words[word] >> 16);
            lost += (value[0] - low.x * scale) + (value[1] - low.y * scale) + (value[2] - high.x * scale) +
                    (value[3] - high.y * scale);
        }
        *reinterpret_cast<uint4*>(to + 16 * sixteen) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    if (a.residual == nullptr) return;
    errors[threadIdx.x] = lost;
    __syncthreads();
    if (part == 0) {
        for (int other = 1; other < PARTS; ++other) lost += errors[other * D + channel];
        a.residual[i64(blockIdx.x) * D + channel] = lost;
    }
}

// What is added to out: V's mean and the mean of what rounding took; a thread a channel. In place of the mean.
__device__ __forceinline__ void add_residual(const Arguments& a) {
    const float keys = max(used(a.kv_lens, blockIdx.x / a.kv_heads, a.kv_len), 1);
    float sum = 0.f;
    for (int block = 0; block < a.key_blocks; ++block)
        sum += a.residual[(i64(blockIdx.x) * a.key_blocks + block) * D + threadIdx.x];
    a.v_means[i64(blockIdx.x) * D + threadIdx.x] += sum / keys;
}

}  // namespace cuflash

using cuflash::Arguments;
extern "C" {
__global__ void __launch_bounds__(256) cuflash_fp8_statistics(const __grid_constant__ Arguments a) { cuflash::take_statistics(a); }
__global__ void __launch_bounds__(CONFIG_HEAD_DIM) cuflash_fp8_summary(const __grid_constant__ Arguments a) { cuflash::summarise(a); }
__global__ void __launch_bounds__(256) cuflash_fp8_queries(const __grid_constant__ Arguments a) { cuflash::quantize_rows<false>(a); }
__global__ void __launch_bounds__(256) cuflash_fp8_keys(const __grid_constant__ Arguments a) { cuflash::quantize_rows<true>(a); }
__global__ void __launch_bounds__(256) cuflash_fp8_values(const __grid_constant__ Arguments a) { cuflash::quantize_values(a); }
__global__ void __launch_bounds__(CONFIG_HEAD_DIM) cuflash_fp8_residual(const __grid_constant__ Arguments a) { cuflash::add_residual(a); }
}
