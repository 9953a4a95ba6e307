// Statistics per channel, of V's rows and of samples of Q's and K's (fp8/sample.py says why that will do): a block has a
// chunk of rows, then one a head. Sums go in one order, the same in each run.
#pragma once

#include "fp8/problem.cuh"

namespace cuflash {

constexpr int CHUNK_THREADS = 128;
constexpr int CHUNK_WARPS = CHUNK_THREADS / 32;
constexpr int ROWS_AT_ONCE = CHUNK_THREADS / UNITS;
constexpr int IN_FLIGHT = 8;     // loads of 16 bytes of a thread
constexpr int CHUNKS_AT_ONCE = 5;  // blocks of a multiprocessor: 80 KB are on their way to it, of which half would do

constexpr int SUMMARY_WARPS = 16;  // of a block, whose lanes have a channel each
constexpr int SUMMARY_THREADS = 32 * SUMMARY_WARPS;

// Of how many runs of a head with so many rows one is in the sample.
__device__ __forceinline__ u32 spacing_of(int rows) { return rows < FEWEST ? 1 : 1u << (31 - __clz(rows / FEWEST)); }

// Which row of the head a sample has at a place: of each so many runs, one as if drawn by lot.
__device__ __forceinline__ int sampled_row(int place, u32 spacing) {
    const u32 run = place / RUN;
    u32 lot = run * 0x9e3779b1u;
    lot = (lot ^ lot >> 15) * 0x85ebca77u;
    return int((run * spacing + __umulhi(lot, spacing)) * RUN) + place % RUN;
}

// How many rows a sample has.
__device__ __forceinline__ int sample_of(int rows) {
    const u32 spacing = spacing_of(rows), each = spacing * RUN;
    if (rows == 0) return 0;
    const int last = (rows - 1) / each * RUN;  // where its last run begins, of which some may lie past the end
    return last + min(max(rows - sampled_row(last, spacing), 0), RUN);
}

// What a thread has of its 8 channels: `take` has another row's, `expect` comes while rows are on their way. Codes begin
// with V's last rows, which are to be in the L2 cache still: a SAMPLE leaves it.
struct QueryRecords {
    static constexpr bool SAMPLE = true;
    float all[Q_RECORDS][8] = {};

    __device__ __forceinline__ void expect() {}
    __device__ __forceinline__ void take(const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) all[0][i] += x[i] * x[i];
    }
    static __device__ __forceinline__ float join(int, float x, float y) { return x + y; }
};

struct KeyRecords {
    static constexpr bool SAMPLE = true;
    uint4 first_unit;
    float first[8], all[K_RECORDS][8] = {};

    __device__ __forceinline__ KeyRecords(const uint4& unit) : first_unit(unit) {}
    // To the compiler the unit changes, or it would wait for it before the first rows are asked for.
    __device__ __forceinline__ void expect() {
        asm volatile("" : "+r"(first_unit.x), "+r"(first_unit.y), "+r"(first_unit.z), "+r"(first_unit.w));
        to_floats(first, first_unit);
    }
    // A mean far from 0 costs no digits of a difference.
    __device__ __forceinline__ void take(const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float difference = x[i] - first[i];
            all[0][i] += difference, all[1][i] += difference * difference;
        }
    }
    static __device__ __forceinline__ float join(int, float x, float y) { return x + y; }
};

struct ValueRecords {
    static constexpr bool SAMPLE = false;
    float all[V_RECORDS][8] = {};

    __device__ __forceinline__ ValueRecords() {
#pragma unroll
        for (int i = 0; i < 8; ++i) all[1][i] = all[2][i] = minus_infinity();
    }
    __device__ __forceinline__ void expect() {}
    __device__ __forceinline__ void take(const float (&x)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) all[0][i] += x[i], all[1][i] = fmaxf(all[1][i], x[i]), all[2][i] = fmaxf(all[2][i], -x[i]);
    }
    static __device__ __forceinline__ float join(int record, float x, float y) { return record == 0 ? x + y : fmaxf(x, y); }
};

typedef float WarpRecords[V_RECORDS][CHUNK_WARPS][D];

// Those of a chunk of a head's rows, or of its sample's, which ends before row `end`.
template <int RECORDS, class Records>
__device__ __forceinline__ void take_chunk(Records records, const Input& from, int entry, int head, int chunk, int end, int dim,
                                           float* to, WarpRecords& shares) {
    const int unit = threadIdx.x % UNITS, warp = threadIdx.x / 32;
    const int last = unit * 8 < dim ? end : 0;  // dims are multiples of 8
    const u32 spacing = spacing_of(end);
    const u16* units_of_head = row_of(from, entry, head, 0) + unit * 8;
#pragma unroll 1
    for (int begin = 0; begin < CHUNK; begin += IN_FLIGHT * ROWS_AT_ONCE) {
        uint4 units[IN_FLIGHT];
        int rows[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int place = chunk * CHUNK + begin + i * ROWS_AT_ONCE + threadIdx.x / UNITS;
            rows[i] = Records::SAMPLE ? sampled_row(place, spacing) : place;
            const u16* at = units_of_head + rows[i] * from.row;
            if (rows[i] < last) units[i] = Records::SAMPLE ? load_leaving(at) : __ldg(reinterpret_cast<const uint4*>(at));
        }
        records.expect();
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            if (rows[i] >= last) continue;
            float x[8];
            to_floats(x, units[i]);
            records.take(x);
        }
    }

#pragma unroll
    for (int record = 0; record < RECORDS; ++record)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& all = records.all[record][i];
#pragma unroll
            for (int other = UNITS; other < 32; other *= 2) all = records.join(record, all, __shfl_xor_sync(~0u, all, other));
            if (threadIdx.x % 32 < UNITS) shares[record][warp][unit * 8 + i] = all;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < RECORDS * D; i += CHUNK_THREADS) {
        const int record = i / D, channel = i % D;
        float all = shares[record][0][channel];
#pragma unroll
        for (int other = 1; other < CHUNK_WARPS; ++other) all = records.join(record, all, shares[record][other][channel]);
        to[i] = all;
    }
}

// Blocks for chunks of Q where it is balanced, of K where it is balanced or centred, and of V.
__device__ __forceinline__ void take_statistics(const Arguments& a) {
    uint4* zeros = reinterpret_cast<uint4*>(a.value_tiles);
    for (int i = blockIdx.x * CHUNK_THREADS + threadIdx.x; i < a.zeros; i += gridDim.x * CHUNK_THREADS) zeros[i] = make_uint4(0, 0, 0, 0);
    __shared__ WarpRecords shares;
    const int of_queries = a.balanced ? a.entries * a.q_heads * a.q_chunks : 0;
    const int of_keys = a.balanced || a.center_k ? a.entries * a.kv_heads * a.k_chunks : 0;
    int block = blockIdx.x;
    if (block < of_queries) {
        const int chunk = block % a.q_chunks, head = block / a.q_chunks % a.q_heads, entry = block / a.q_chunks / a.q_heads;
        take_chunk<Q_RECORDS>(QueryRecords(), a.q, entry, head, chunk, used(a.q_lens, entry, a.q_len), a.dim,
                              a.q_partial + i64(block) * (Q_RECORDS * D), shares);
        return;
    }
    block -= of_queries;
    const bool of_k = block < of_keys;
    if (!of_k) block -= of_keys;
    const int chunks = of_k ? a.k_chunks : a.v_chunks;
    const int chunk = block % chunks, head = block / chunks % a.kv_heads, entry = block / chunks / a.kv_heads;
    const int keys = used(a.kv_lens, entry, a.kv_len);
    if (of_k) {
        uint4 first = make_uint4(0, 0, 0, 0);
        const int channel = threadIdx.x % UNITS * 8;
        if (keys > 0 && channel < a.dim) first = __ldg(reinterpret_cast<const uint4*>(row_of(a.k, entry, head, 0) + channel));
        take_chunk<K_RECORDS>(KeyRecords(first), a.k, entry, head, chunk, keys, a.dim,
                              a.k_partial + i64(block) * (K_RECORDS * D), shares);
    } else {
        take_chunk<V_RECORDS>(ValueRecords(), a.v, entry, head, chunk, keys, a.dim,
                              a.v_partial + i64(block) * (V_RECORDS * D), shares);
    }
}

// A block of `summarise` has a head and 32 of its channels.
struct Channel {
    int head_of_all, entry, head, channel;
    i64 at;  // in arrays of (entries, kv_heads, D)

    __device__ __forceinline__ Channel(const Arguments& a) {
        head_of_all = blockIdx.x / (D / 32), channel = blockIdx.x % (D / 32) * 32 + threadIdx.x % 32;
        entry = head_of_all / a.kv_heads, head = head_of_all % a.kv_heads, at = i64(head_of_all) * D + channel;
    }
};

// Means, factors and V's scales. Each warp goes through its share of the chunks, then one has the channel's numbers.
__device__ __forceinline__ void summarise(const Arguments& a) {
    enum { K_SUM, K_SQUARES, V_SUM, V_MOST, V_MOST_NEGATED, Q_SQUARES, ALL };
    __shared__ float shares[SUMMARY_WARPS][ALL][32];
    const Channel c(a);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // What is no statistic is asked for before these are complete.
    const int length = used(a.kv_lens, c.entry, a.kv_len), q_length = used(a.q_lens, c.entry, a.q_len);
    const bool exists = length > 0 && c.channel < a.dim;
    const float first = exists ? low_of(row_of(a.k, c.entry, c.head, 0)[c.channel], CONFIG_ELEMENT()) : 0.f;
    const float sign = a.signs != nullptr ? a.signs[(a.signs_per_head ? c.head * D : 0) + c.channel] : 1.f;
    await_kernel_before();

    auto join = [](int which, float x, float y) { return which == V_MOST || which == V_MOST_NEGATED ? fmaxf(x, y) : x + y; };
    float all[ALL] = {0.f, 0.f, 0.f, minus_infinity(), minus_infinity(), 0.f};
    const int k_chunks = a.balanced || a.center_k ? a.k_chunks : 0;
    const int q_chunks = a.balanced ? a.group * a.q_chunks : 0;  // of the heads that share the keys, one after another
    const float* v = a.v_partial + i64(c.head_of_all) * a.v_chunks * (V_RECORDS * D) + c.channel;
    const float* k = a.k_partial + i64(c.head_of_all) * k_chunks * (K_RECORDS * D) + c.channel;
    const float* q = a.q_partial + i64(c.head_of_all) * q_chunks * (Q_RECORDS * D) + c.channel;
    const int most = max(a.v_chunks, max(k_chunks, q_chunks));
    constexpr int AT_ONCE = 4;  // chunks of a warp, whose records are all under way together
    for (int begin = warp; begin < most; begin += AT_ONCE * SUMMARY_WARPS) {
        float found[AT_ONCE][ALL];  // where there is no chunk, what changes nothing
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const i64 chunk = begin + n * SUMMARY_WARPS;
#pragma unroll
            for (int i = 0; i < V_RECORDS; ++i)
                found[n][V_SUM + i] = chunk < a.v_chunks ? v[(chunk * V_RECORDS + i) * D] : i == 0 ? 0.f : minus_infinity();
#pragma unroll
            for (int i = 0; i < K_RECORDS; ++i) found[n][K_SUM + i] = chunk < k_chunks ? k[(chunk * K_RECORDS + i) * D] : 0.f;
            found[n][Q_SQUARES] = chunk < q_chunks ? q[chunk * (Q_RECORDS * D)] : 0.f;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
            for (int i = 0; i < ALL; ++i) all[i] = join(i, all[i], found[n][i]);
    }
#pragma unroll
    for (int i = 0; i < ALL; ++i) shares[warp][i][lane] = all[i];
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int i = 0; i < ALL; ++i)
        for (int other = 1; other < SUMMARY_WARPS; ++other) all[i] = join(i, all[i], shares[other][i][lane]);

    const float keys = max(length, 1), sampled_keys = max(sample_of(length), 1);
    const float queries = float(max(sample_of(q_length), 1)) * a.group;
    const float moved = all[K_SUM] / sampled_keys, k_mean = first + moved;
    a.k_means[c.at] = a.center_k ? k_mean : 0.f;

    const float variance = fmaxf(all[K_SQUARES] / sampled_keys - moved * moved, 0.f);
    const float k_size = a.center_k ? variance : variance + k_mean * k_mean, q_size = all[Q_SQUARES] / queries;
    float balance = 1.f;
    if (a.balanced && k_size > 0.f && q_size > 0.f && is_finite(k_size) && is_finite(q_size))
        balance = fminf(fmaxf(sqrtf(sqrtf(k_size / q_size)), 1.f / 256.f), 256.f);
    const float weight = a.root * sign;
    a.q_factors[c.at] = __fmul_rn(weight, balance);
    a.k_factors[c.at] = __fmul_rn(weight, __frcp_rn(balance));

    const float v_mean = all[V_SUM] / keys, taken = a.center_v ? v_mean : 0.f;
    float size = fmaxf(fabsf(all[V_MOST] - taken), fabsf(-all[V_MOST_NEGATED] - taken));
    if (!exists) size = 0.f;
    if (!is_finite(v_mean)) size = __int_as_float(0x7fc00000);  // of NaN, which the largest leave out
    a.v_scales[c.at] = scale_for(size, LARGEST_V);
    a.v_means[c.at] = a.center_v || a.residual_mean ? v_mean : 0.f;
}

}  // namespace cuflash
