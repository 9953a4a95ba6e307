// The middle pass of standard attention: scores S (float32, from the first matrix product) become weights
// P = exp(t - max t), stored in the dtype of the second product, with t the scaled, capped, biased and masked score.
// P stays unnormalised, so that a 16-bit P keeps its precision however many keys share a row; store_rows divides.
//
// One block a row. S is read twice (the second time from cache) and P written once; nothing else of that size moves.
// For any compute capability: no tensor cores, no asynchronous copies, warp shuffles only.
//
// Configuration: CONFIG_WEIGHT, CONFIG_BIAS and CONFIG_OUT name the types below of P, the bias and the output;
// CONFIG_SOFTMAX_ROWS and CONFIG_STORE_ROWS the two kernels, for profilers.

namespace cuflash {

typedef long long i64;
typedef unsigned short u16;

// NVRTC has no <cmath>.
__device__ float minus_infinity() { return __int_as_float(0xff800000); }

struct Float16 {
    typedef u16 Bits;
    static __device__ float load(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ u16 store(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
};

struct Bfloat16 {
    typedef u16 Bits;
    static __device__ float load(u16 bits) { return __uint_as_float(unsigned(bits) << 16); }
    // By hand: the conversion instruction is missing before compute capability 8.0.
    static __device__ u16 store(float value) {
        const unsigned bits = __float_as_uint(value);
        if (value != value) return u16((bits >> 16) | 0x40);  // rounding could turn a NaN into Inf
        return u16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
    }
};

struct Float32 {
    typedef float Bits;
    static __device__ float load(float value) { return value; }
    static __device__ float store(float value) { return value; }
};

// One chunk, as `families/standard.py` fills it: `entries` batch entries from first_entry, `heads` kv heads from first_head,
// `rows` query rows from first_row, keys from first_key. Rows of S lie in the order entry, kv head, head of its group, query
// row.
struct Chunk {
    const float* scores;
    void* weights;
    float* totals;             // sum of a row's weights
    const float* sums;         // weights @ V, contiguous rows of head_dim_v
    void* out;                 // the caller's
    float* lse;                // (batch, q_heads, q_len), or null
    const unsigned char* mask;  // or null
    const void* bias;          // or null
    const i64* q_lens;         // or null
    const i64* kv_lens;        // or null
    i64 mask_strides[4];       // in elements, over (batch, q_heads, q_len, kv_len)
    i64 bias_strides[4];
    i64 out_strides[4];        // over (batch, q_heads, q_len, head_dim_v)
    i64 left, right;           // window bounds; a large number for none
    i64 q_len, kv_len, first_row, first_key, pitch;  // pitch: elements between rows of S and of P
    int group, q_heads, heads, rows, keys, first_entry, first_head, head_dim_v, all_rows;
    int top_left;
    float softcap;             // 0 for none
};
static_assert(sizeof(Chunk) == 280, "the fields and sizes in families/standard.py");

struct Row {
    i64 entry, head, query;
};

// In 32 bits: a grid has fewer rows than that, and a 64-bit division costs as much as a short row.
__device__ Row locate(const Chunk& chunk, unsigned row) {
    const unsigned within = row / unsigned(chunk.rows);  // (entry, kv head, head of the group)
    const unsigned matrix = within / unsigned(chunk.group);
    Row at;
    at.query = chunk.first_row + row % unsigned(chunk.rows);
    at.head = (chunk.first_head + matrix % unsigned(chunk.heads)) * chunk.group + within % unsigned(chunk.group);
    at.entry = chunk.first_entry + matrix / unsigned(chunk.heads);
    return at;
}

__device__ i64 used_length(const i64* lens, i64 entry, i64 capacity) {
    if (lens == nullptr) return capacity;
    const i64 length = lens[entry];  // not checked on the host when it lives on the device
    return length < 0 ? 0 : length > capacity ? capacity : length;
}

template <class Combine>
__device__ float reduce_block(float value, float* shared, Combine combine) {
    for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
    __syncthreads();  // the previous reduction has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) value = combine(value, shared[warp]);
    return value;
}

struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Sum {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// The scaled score of a row's columns after softcap and bias, -inf where hidden. Hiding selects, so that whatever a
// hidden key holds, NaN included, does not matter.
template <class Bias>
struct Scores {
    const float* raw;
    const unsigned char* mask;  // at the chunk's first key, or null
    const typename Bias::Bits* bias;
    i64 mask_step, bias_step;
    float softcap;
    int first, last;  // columns that the row can see by window and length

    __device__ Scores(const Chunk& chunk, unsigned row, const Row& at) {
        raw = chunk.scores + row * chunk.pitch;
        const i64* m = chunk.mask_strides;
        const i64* b = chunk.bias_strides;
        const typename Bias::Bits* biases = static_cast<const typename Bias::Bits*>(chunk.bias);
        mask = chunk.mask ? chunk.mask + at.entry * m[0] + at.head * m[1] + at.query * m[2] + chunk.first_key * m[3]
                          : nullptr;
        bias = biases ? biases + at.entry * b[0] + at.head * b[1] + at.query * b[2] + chunk.first_key * b[3] : nullptr;
        mask_step = m[3];
        bias_step = b[3];
        softcap = chunk.softcap;
        const i64 q_len = used_length(chunk.q_lens, at.entry, chunk.q_len);
        const i64 kv_len = used_length(chunk.kv_lens, at.entry, chunk.kv_len);
        const i64 centre = at.query + (chunk.top_left ? 0 : kv_len - q_len) - chunk.first_key;
        first = int(min(max(centre - chunk.left, i64(0)), i64(chunk.keys)));
        last = int(max(min(min(centre + chunk.right, kv_len - 1 - chunk.first_key), i64(chunk.keys - 1)), i64(-1)));
        if (at.query >= q_len) last = -1;
    }

    __device__ float column(int c, float score) const {
        if (c < first || c > last || (mask != nullptr && !mask[c * mask_step])) return minus_infinity();
        if (softcap != 0.f) score = softcap * tanhf(score / softcap);
        if (bias != nullptr) score += Bias::load(bias[c * bias_step]);
        return score;
    }

    // Four columns at a time: rows start on 16 bytes, and reach to the pitch, whose last columns are never seen.
    __device__ float4 columns(int c) const {
        const float4 s = *reinterpret_cast<const float4*>(raw + c);
        return make_float4(column(c, s.x), column(c + 1, s.y), column(c + 2, s.z), column(c + 3, s.w));
    }
};

__device__ void store_four(float* at, float4 weights, Float32) { *reinterpret_cast<float4*>(at) = weights; }

template <class Weight>
__device__ void store_four(u16* at, float4 w, Weight) {
    const ushort4 four = {Weight::store(w.x), Weight::store(w.y), Weight::store(w.z), Weight::store(w.w)};
    *reinterpret_cast<ushort4*>(at) = four;
}

template <class Weight, class Bias>
__device__ void softmax_rows(const Chunk& chunk) {
    __shared__ float shared[32];
    const unsigned row = blockIdx.x;
    const Row at = locate(chunk, row);
    const Scores<Bias> scores(chunk, row, at);

    float top = minus_infinity();
    for (int c = 4 * threadIdx.x; c < chunk.keys; c += 4 * blockDim.x) {
        const float4 s = scores.columns(c);
        top = fmaxf(top, fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w)));
    }
    top = reduce_block(top, shared, Max());
    const float shift = top == minus_infinity() ? 0.f : top;  // a row that sees no key: weights 0, not NaN

    // float32 weights overwrite the scores: each element is read before it is written, by the same thread.
    typename Weight::Bits* weights = static_cast<typename Weight::Bits*>(chunk.weights) + row * chunk.pitch;
    float total = 0.f;
    for (int c = 4 * threadIdx.x; c < chunk.keys; c += 4 * blockDim.x) {
        const float4 s = scores.columns(c);
        const float4 p = make_float4(expf(s.x - shift), expf(s.y - shift), expf(s.z - shift), expf(s.w - shift));
        store_four(weights + c, p, Weight());
        total += (p.x + p.y) + (p.z + p.w);
    }
    total = reduce_block(total, shared, Sum());
    if (threadIdx.x != 0) return;
    chunk.totals[row] = total;
    if (chunk.lse != nullptr)
        chunk.lse[(at.entry * chunk.q_heads + at.head) * chunk.q_len + at.query] = shift + logf(total);
}

// Divide by the row sums, round, and write to the caller's output, whatever its strides. One warp a row.
template <class Out>
__device__ void store_rows(const Chunk& chunk) {
    const unsigned row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= chunk.all_rows) return;
    const Row at = locate(chunk, row);
    const i64* step = chunk.out_strides;
    const float* sums = chunk.sums + i64(row) * chunk.head_dim_v;
    typename Out::Bits* out =
        static_cast<typename Out::Bits*>(chunk.out) + at.entry * step[0] + at.head * step[1] + at.query * step[2];
    const float total = chunk.totals[row];
    for (int c = threadIdx.x % 32; c < chunk.head_dim_v; c += 32)
        out[c * step[3]] = Out::store(total == 0.f ? 0.f : sums[c] / total);
}

}  // namespace cuflash

extern "C" __global__ void CONFIG_SOFTMAX_ROWS(const cuflash::Chunk chunk) {
    cuflash::softmax_rows<cuflash::CONFIG_WEIGHT, cuflash::CONFIG_BIAS>(chunk);
}

extern "C" __global__ void CONFIG_STORE_ROWS(const cuflash::Chunk chunk) {
    cuflash::store_rows<cuflash::CONFIG_OUT>(chunk);
}
