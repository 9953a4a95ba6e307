// The middle pass of standard attention: scores S (float32, from the first matrix product) become weights
// P = exp(t - max t), stored in the dtype of the second product, with t the scaled, capped, biased and masked score.
// P stays unnormalised, so that a 16-bit P keeps its precision however many keys share a row; store_rows divides.
//
// One block a row. S is read twice (the second time from cache) and P written once; nothing else of that size moves.
// For any compute capability: no tensor cores, no asynchronous copies, warp shuffles only.

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

// One chunk: `entries` batch entries from first_entry, `heads` kv heads from first_head, `rows` query rows from
// first_row, keys from first_key. Rows of S lie in the order entry, kv head, head of its group, query row.
struct Chunk {
    const float* scores;
    void* weights;
    float* totals;             // sum of a row's weights
    float* lse;                // (batch, q_heads, q_len), or null
    const unsigned char* mask;  // or null
    const void* bias;          // or null
    const i64* q_lens;         // or null
    const i64* kv_lens;        // or null
    i64 mask_strides[4];       // in elements, over (batch, q_heads, q_len, kv_len)
    i64 bias_strides[4];
    i64 left, right;           // window bounds; a large number for none
    i64 q_len, kv_len, first_row, first_key, pitch;  // pitch: elements between rows of S and of P
    int group, q_heads, heads, rows, keys, first_entry, first_head;
    int top_left;
    float softcap;             // 0 for none
};

struct Row {
    i64 entry, head, query;
};

__device__ Row locate(const Chunk& chunk, i64 row) {
    const i64 within = row / chunk.rows;  // (entry, kv head, head of the group)
    const i64 matrix = within / chunk.group;
    Row at;
    at.query = chunk.first_row + row % chunk.rows;
    at.head = (chunk.first_head + matrix % chunk.heads) * chunk.group + within % chunk.group;
    at.entry = chunk.first_entry + matrix / chunk.heads;
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

// Masked scores are -inf, by selection: whatever a hidden key holds, NaN included, does not matter.
template <class Bias>
struct Score {
    const Chunk& chunk;
    const float* scores;
    const unsigned char* mask;
    const typename Bias::Bits* bias;
    i64 lowest, highest;  // keys that the row can see

    __device__ Score(const Chunk& chunk, i64 row, const Row& at) : chunk(chunk) {
        scores = chunk.scores + row * chunk.pitch;
        const i64* m = chunk.mask_strides;
        const i64* b = chunk.bias_strides;
        mask = chunk.mask ? chunk.mask + at.entry * m[0] + at.head * m[1] + at.query * m[2] : nullptr;
        const typename Bias::Bits* base = static_cast<const typename Bias::Bits*>(chunk.bias);
        bias = base ? base + at.entry * b[0] + at.head * b[1] + at.query * b[2] : nullptr;
        const i64 q_len = used_length(chunk.q_lens, at.entry, chunk.q_len);
        const i64 kv_len = used_length(chunk.kv_lens, at.entry, chunk.kv_len);
        const i64 centre = at.query + (chunk.top_left ? 0 : kv_len - q_len);
        lowest = centre - chunk.left;
        highest = at.query < q_len ? min(centre + chunk.right, kv_len - 1) : -1;
    }

    __device__ float operator()(int column) const {
        const i64 key = chunk.first_key + column;
        const bool seen = key >= lowest && key <= highest && (mask == nullptr || mask[key * chunk.mask_strides[3]]);
        float score = scores[column];
        if (chunk.softcap != 0.f) score = chunk.softcap * tanhf(score / chunk.softcap);
        if (bias != nullptr) score += Bias::load(bias[key * chunk.bias_strides[3]]);
        return seen ? score : minus_infinity();
    }
};

template <class Weight, class Bias>
__global__ void softmax_rows(const Chunk chunk) {
    __shared__ float shared[32];
    const i64 row = blockIdx.x;
    const Row at = locate(chunk, row);
    const Score<Bias> score(chunk, row, at);

    float top = minus_infinity();
    for (int column = threadIdx.x; column < chunk.keys; column += blockDim.x) top = fmaxf(top, score(column));
    top = reduce_block(top, shared, Max());
    const float shift = top == minus_infinity() ? 0.f : top;  // a row that sees no key: weights 0, not NaN

    // float32 weights overwrite the scores: each element is read before it is written, by the same thread.
    typename Weight::Bits* weights = static_cast<typename Weight::Bits*>(chunk.weights) + row * chunk.pitch;
    float total = 0.f;
    for (int column = threadIdx.x; column < chunk.keys; column += blockDim.x) {
        const float weight = expf(score(column) - shift);
        weights[column] = Weight::store(weight);
        total += weight;
    }
    total = reduce_block(total, shared, Sum());
    if (threadIdx.x != 0) return;
    chunk.totals[row] = total;
    if (chunk.lse != nullptr)
        chunk.lse[(at.entry * chunk.q_heads + at.head) * chunk.q_len + at.query] = shift + logf(total);
}

// Divide by the row sums, round, and write to the caller's output, whatever its strides.
template <class Out>
__global__ void store_rows(const Chunk chunk, const float* sums, void* out, i64 s0, i64 s1, i64 s2, i64 s3, int dim,
                           i64 count) {
    for (i64 index = i64(blockIdx.x) * blockDim.x + threadIdx.x; index < count; index += i64(gridDim.x) * blockDim.x) {
        const i64 row = index / dim;
        const Row at = locate(chunk, row);
        const float total = chunk.totals[row];
        const float value = total == 0.f ? 0.f : sums[index] / total;
        static_cast<typename Out::Bits*>(out)[at.entry * s0 + at.head * s1 + at.query * s2 + index % dim * s3] =
            Out::store(value);
    }
}

}  // namespace cuflash
