// Attention forward for compute capability 8.0 and newer: FlashAttention-2 (Dao 2023, section 3) on mma.sync.
//
// A block owns M query rows of one head. SIDES = 1: a warp owns whole rows, so that softmax needs no shared memory.
// SIDES = 2, for wide heads: two warps own twice as many rows, each half of the keys of S and half of the columns of O.
// They read a fifth less of shared memory, which is what bounds wide heads, but have to agree on the rows' references and
// hand each other their weights.
//
// Key tiles run from the last to the first: tiles that a mask or the end of the keys cuts come first or last, and only
// those are masked. Loads are asynchronous: V comes during Q Kᵀ, the next K during P V. Their barriers let a warp run ahead
// of the others by up to a product. While a warp is at its softmax, another of the same multiprocessor multiplies.
//
// Budget a thread, in registers:  S = ROW_TILES * KEYS / 2,  O = ROW_TILES * COLUMNS / 2,  about 45 beside; 255 at most.
// Shared memory, in bytes:        2 * (M * max(D, DV) + BN * (D + DV)), D and DV rounded up to 64 columns, and for two
//                                 sides 2 * M * BN of weights.
//
// Scores live in units of log2: weight = 2^(s * factor - top), where top is a row's largest so far. A stale reference would
// save most of the rescaling, at an error 3 % larger: a row's largest weight, now 1 exactly, would be rounded too.

#include "common/tanh.cuh"
#include "sm80/tiles.cuh"

namespace cuflash {

struct Config {
    typedef CONFIG_ELEMENT Element;
    static constexpr int D = CONFIG_HEAD_DIM;      // multiples of 16 at or above the true dims
    static constexpr int DV = CONFIG_HEAD_DIM_V;
    static constexpr int M = CONFIG_Q_ROWS;
    static constexpr int BN = CONFIG_KEYS;
    static constexpr int WARPS = CONFIG_WARPS;
    static constexpr int BLOCKS = CONFIG_BLOCKS;   // of one multiprocessor, to divide the registers by
    static constexpr int UNROLL = CONFIG_UNROLL;   // steps of Q Kᵀ: more hide latency, fewer spare registers
    static constexpr bool BOUNDED = CONFIG_BOUNDED;  // causal or window
    static constexpr bool SOFTCAP = CONFIG_SOFTCAP;
    static constexpr bool ALIGNED = CONFIG_ALIGNED;  // rows start on 16 bytes and have a multiple of 8 columns
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int SIDES = CONFIG_SIDES;
    static constexpr int ROW_TILES = M * SIDES / (16 * WARPS);
    static constexpr int KEYS = BN / SIDES, COLUMNS = DV / SIDES;  // of a warp
};
static_assert(Config::M * Config::SIDES == 16 * Config::WARPS * Config::ROW_TILES, "whole tiles of 16 rows of a warp");
static_assert(Config::D % 32 == 0 && Config::DV % 32 == 0 && Config::KEYS % 16 == 0, "whole panels and products");
static_assert(Config::SIDES == 1 || Config::COLUMNS % 64 == 0, "a side has whole panels");

struct Arguments {
    const u16 *q, *k, *v;
    u16* out;
    float* lse;        // (batch, q_heads, q_len), or null
    const i64* q_lens;   // or null
    const i64* kv_lens;  // or null
    i64 q_entry, q_head, q_row;  // strides in elements; columns lie next to each other
    i64 k_entry, k_head, k_row;
    i64 v_entry, v_head, v_row;
    i64 out_entry, out_head, out_row;
    int q_heads, group, q_len, kv_len, head_dim, head_dim_v, row_blocks;
    int left, right;   // window bounds, large for none
    int top_left;
    float factor;      // of a score, to log2 units
    float premultiply; // of a raw score before that, where prepare says so: a scale that is not positive, or scale / cap
    float unseen;      // largest score of a row that has seen no key: finite, so that hidden scores weigh 0
    int prepare, out_aligned;
};
static_assert(sizeof(Arguments) == 216, "the fields and sizes in families/sm80.py");

// Accumulators of a warp: 16-row tiles x 8-column tiles. Lane l holds rows l / 4 and l / 4 + 8 of each, columns
// 2 * (l % 4) and the next: elements 0 and 1 of the first row, 2 and 3 of the second.
typedef float ScoreTiles[Config::ROW_TILES][Config::KEYS / 8][4];
typedef float OutTiles[Config::ROW_TILES][Config::COLUMNS / 8][4];
typedef float RowValues[Config::ROW_TILES][2];
typedef u32 Weights[Config::ROW_TILES][Config::KEYS / 16][4];  // as a product takes them, 16 keys a step

// Rows and parts of a warp.
struct Warp {
    int row, side;  // first row in the tile
    __device__ __forceinline__ Warp() {
        const int warp = threadIdx.x / 32;
        row = warp / Config::SIDES * 16 * Config::ROW_TILES, side = warp % Config::SIDES;
    }
    __device__ __forceinline__ int pair() const { return row / (16 * Config::ROW_TILES); }
};

__device__ __forceinline__ void clear(ScoreTiles& scores) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < Config::KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][n][e] = 0.f;
}

// scores += Q Kᵀ over one step of 16 columns, for the rows and keys from those addresses on.
__device__ __forceinline__ void multiply_step(ScoreTiles& scores, u32 q_rows, u32 k_rows, int step) {
    const int lane = threadIdx.x % 32;
    const u32 q_at = q_rows + step_offset<Config::M>(unit_offset(lane % 16, lane / 16), step);
    const u32 k_at = k_rows + step_offset<Config::BN>(unit_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), step);
    u32 q[Config::ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r) load_matrices(q[r], q_at + 2048 * r);
#pragma unroll
    for (int n = 0; n < Config::KEYS / 16; ++n) {
        u32 k[4];
        load_matrices(k, k_at + 2048 * n);
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r) {
            multiply(scores[r][2 * n], q[r], k[0], k[1], Config::Element());
            multiply(scores[r][2 * n + 1], q[r], k[2], k[3], Config::Element());
        }
    }
}

__device__ __forceinline__ void pack_weights(Weights& weights, const ScoreTiles& scores) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int step = 0; step < Config::KEYS / 16; ++step) {
            const float(&left)[4] = scores[r][2 * step];
            const float(&right)[4] = scores[r][2 * step + 1];
            weights[r][step][0] = pack(left[0], left[1], Config::Element());
            weights[r][step][1] = pack(left[2], left[3], Config::Element());
            weights[r][step][2] = pack(right[0], right[1], Config::Element());
            weights[r][step][3] = pack(right[2], right[3], Config::Element());
        }
}

// out += P V over KEYS rows of V, from that address on
__device__ __forceinline__ void multiply_weights_and_values(OutTiles& out, const Weights& weights, u32 v_rows) {
    const int lane = threadIdx.x % 32;
    const u32 v_lane = unit_offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < Config::KEYS / 16; ++step)
#pragma unroll
        for (int n = 0; n < Config::COLUMNS / 16; ++n) {
            u32 v[4];
            load_matrices_transposed(v, v_rows + step_offset<Config::BN>(v_lane, n) + 2048 * step);
#pragma unroll
            for (int r = 0; r < Config::ROW_TILES; ++r) {
                multiply(out[r][2 * n], weights[r][step], v[0], v[1], Config::Element());
                multiply(out[r][2 * n + 1], weights[r][step], v[2], v[3], Config::Element());
            }
        }
}

// Weights of a warp in shared memory: unit i of each lane, then unit i + 1 of each.
constexpr int WEIGHT_BYTES = 32 * sizeof(Weights);

__device__ __forceinline__ void give_weights(const Weights& weights, u32 to) {
    u32 at = to + threadIdx.x % 32 * 16;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int step = 0; step < Config::KEYS / 16; ++step, at += 512) store_unit(at, weights[r][step]);
}

__device__ __forceinline__ void take_weights(Weights& weights, u32 from) {
    u32 at = from + threadIdx.x % 32 * 16;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int step = 0; step < Config::KEYS / 16; ++step, at += 512) load_unit(weights[r][step], at);
}

__device__ __forceinline__ void copy(RowValues& to, const RowValues& from) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r) to[r][0] = from[r][0], to[r][1] = from[r][1];
}

// Values of the rows of a pair of warps: each lane gets its rows' from its own of the other side.
struct Exchange {
    float values[Config::WARPS][Config::ROW_TILES * 16];

    __device__ __forceinline__ void swap(RowValues& values_of_rows, const Warp& warp) {
        const int lane = threadIdx.x % 32, self = threadIdx.x / 32;
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (lane % 4 == 0) values[self][16 * r + 8 * half + lane / 4] = values_of_rows[r][half];
        pair_sync(1 + warp.pair());
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                values_of_rows[r][half] = values[self ^ 1][16 * r + 8 * half + lane / 4];
    }
};

// What has to happen to raw scores before the softmax, beside the plain factor that exp2 folds in.
__device__ __forceinline__ void prepare_scores(ScoreTiles& scores, float premultiply) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < Config::KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float score = scores[r][n][e] * premultiply;
                scores[r][n][e] = Config::SOFTCAP ? tanh_exact(score) : score;
            }
}

// Selects, so that what a hidden key holds does not matter. `centre` is the key that the lane's first row is aligned with.
__device__ __forceinline__ void hide_keys(ScoreTiles& scores, int first_key, int kv_len, int centre, int left,
                                          int right) {
    const int lane_key = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = centre + 16 * r + 8 * half;
            const int low = Config::BOUNDED ? at - left - lane_key : -1;
            const int high = (Config::BOUNDED ? min(at + right, kv_len - 1) : kv_len - 1) - lane_key;
#pragma unroll
            for (int n = 0; n < Config::KEYS / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < low || 8 * n + e > high) scores[r][n][2 * half + e] = minus_infinity();
        }
}

// Beyond 2^24 the product with the factor is off by more than 1: the difference of scores has to come first.
__device__ __forceinline__ bool is_huge(float score, const Arguments& a) {
    return (fabsf(score * a.factor) > 16777216.f) & (score != a.unseen);
}

// Finds the reference of each row: its largest score so far. Says whether one of the warp is huge.
__device__ __forceinline__ bool find_references(const ScoreTiles& scores, const RowValues& tops, RowValues& found,
                                                const Arguments& a, const Warp& warp, Exchange& exchange) {
    bool huge = false;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = tops[r][half];
#pragma unroll
            for (int n = 0; n < Config::KEYS / 8; ++n)
                top = fmaxf(top, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
            if (Config::SIDES == 1) huge |= is_huge(top, a);  // some lane has the largest, and knows before the others
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            found[r][half] = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        }
    if (Config::SIDES == 2) {
        RowValues other;
        copy(other, found);
        exchange.swap(other, warp);
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                found[r][half] = fmaxf(found[r][half], other[r][half]);
                huge |= is_huge(found[r][half], a);  // both sides must agree
            }
    }
    return __any_sync(~0u, huge);
}

__device__ __forceinline__ void subtract_references(ScoreTiles& scores, const RowValues& tops) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < Config::KEYS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][n][e] -= tops[r][e / 2];
}

// Scores become weights and join the row sums. These and out are scaled first: always, since that hides among the
// exponentials, which a branch around it would not.
__device__ __forceinline__ void exponentiate(ScoreTiles& scores, OutTiles& out, RowValues& totals, const RowValues& old,
                                             const RowValues& tops, float factor, bool difference_first) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float offset = difference_first ? 0.f : __fmul_rn(tops[r][half], factor);
            // What comes before and after agrees: products are rounded alike, differences have none.
            const float scale = exp2_approx(difference_first ? (old[r][half] - tops[r][half]) * factor
                                                             : __fmul_rn(old[r][half], factor) - offset);
            totals[r][half] *= scale;
#pragma unroll
            for (int n = 0; n < Config::KEYS / 8; ++n) {
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    scores[r][n][e] = exp2_approx(scores[r][n][e] * factor - offset);
                    totals[r][half] += scores[r][n][e];
                }
                constexpr int TILES = Config::COLUMNS / 8, STEPS = Config::KEYS / 8;
#pragma unroll
                for (int c = n * TILES / STEPS; c < (n + 1) * TILES / STEPS; ++c)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) out[r][c][e] *= scale;
            }
        }
}

// Where the warp begins or ends to take weights from differences, its sums so far change to the references of those: exact,
// and not rounded as a product. Bounded, so that what nothing has been added to stays 0.
__device__ __forceinline__ void change_references(OutTiles& out, RowValues& totals, const RowValues& tops, float factor,
                                                  bool difference_first) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float rounded_off = fmaf(tops[r][half], factor, -__fmul_rn(tops[r][half], factor));
            const float exponent = difference_first ? -rounded_off : rounded_off;
            const float scale = exp2_approx(fminf(fmaxf(exponent, -100.f), 100.f));
            totals[r][half] *= scale;
#pragma unroll
            for (int c = 0; c < Config::COLUMNS / 8; ++c)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) out[r][c][e] *= scale;
        }
}

// What a block works on. Blocks of one head lie together, so that they share its keys in the cache; the longest rows
// first.
struct Work {
    const u16 *q, *k, *v;        // of the head
    int entry, head, first_row;
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // key tiles that some row sees
    int clean_begin, clean_end;  // of those, the ones that all rows see whole

    __device__ __forceinline__ void find(const Arguments& a) {
        const int head_of_all = blockIdx.x / a.row_blocks;
        entry = head_of_all / a.q_heads, head = head_of_all % a.q_heads;
        first_row = (a.row_blocks - 1 - int(blockIdx.x % a.row_blocks)) * Config::M;
        q_len = used_length(a.q_lens, entry, a.q_len);
        kv_len = used_length(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;
        q = a.q + entry * a.q_entry + head * a.q_head;
        k = a.k + entry * a.k_entry + head / a.group * a.k_head;
        v = a.v + entry * a.v_entry + head / a.group * a.v_head;

        begin = clean_begin = 0;
        end = (kv_len + Config::BN - 1) / Config::BN;
        clean_end = kv_len / Config::BN;
        if (Config::BOUNDED) {
            const int first_key = first_row + diagonal, last_row = min(first_row + Config::M, q_len) - 1;
            begin = max(0, first_key - a.left) / Config::BN;
            end = min(end, (max(0, last_row + diagonal + a.right + 1) + Config::BN - 1) / Config::BN);
            clean_begin = (max(0, first_key + Config::M - 1 - a.left) + Config::BN - 1) / Config::BN;
            clean_end = min(clean_end, max(0, first_key + a.right + 1) / Config::BN);
        }
        if (first_row >= q_len) end = begin;
    }
};

// Divide by the row sums and write, through the shared memory of Q: each warp its own rows and columns, whose Q nobody
// reads any more.
__device__ __forceinline__ void store_rows(const Arguments& a, OutTiles& out, RowValues& tops, RowValues& totals,
                                           const Work& work, u32 tile, const Warp& warp, Exchange& exchange) {
    const int entry = work.entry, head = work.head, first_row = work.first_row, q_len = work.q_len;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            totals[r][half] += __shfl_xor_sync(~0u, totals[r][half], 1);
            totals[r][half] += __shfl_xor_sync(~0u, totals[r][half], 2);
        }
    if (Config::SIDES == 2) {
        RowValues other;
        copy(other, totals);
        exchange.swap(other, warp);
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) totals[r][half] += other[r][half];
    }
    const u32 columns = tile + warp.side * (Config::COLUMNS / 64) * Config::M * 128;
    __syncwarp();  // no lane reads Q any more
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = totals[r][half];
            const int row = warp.row + 16 * r + 8 * half + lane / 4;
            const bool used = first_row + row < q_len;
            const float inverse = total == 0.f || !used ? 0.f : 1.f / total;
            const bool dead = total == 0.f || !used;  // 0 even where sums are not finite
            if (a.lse != nullptr && warp.side == 0 && lane % 4 == 0 && first_row + row < a.q_len) {
                // log2 of a sum and a top in log2 units; ln 2 turns both to natural ones
                const float top = __fmul_rn(tops[r][half], a.factor);
                a.lse[(i64(entry) * a.q_heads + head) * a.q_len + first_row + row] =
                    dead ? minus_infinity() : 0.693147181f * (top + __log2f(total));
            }
#pragma unroll
            for (int n = 0; n < Config::COLUMNS / 8; ++n) {
                const float x = dead ? 0.f : out[r][n][2 * half] * inverse;
                const float y = dead ? 0.f : out[r][n][2 * half + 1] * inverse;
                const u32 pair = pack(x, y, Config::Element());
                store_pair(columns + n / 8 * Config::M * 128 + unit_offset(row, n % 8) + 4 * (lane % 4), pair);
            }
        }
    __syncwarp();
    constexpr int UNITS = Config::COLUMNS / 8;
    constexpr int ROWS = 16 * Config::ROW_TILES;
    const int first_column = warp.side * Config::COLUMNS;
    u16* base = a.out + entry * a.out_entry + head * a.out_head + first_column;
    const int head_dim_v = a.head_dim_v - first_column;
    for (int copy = lane; copy < ROWS * UNITS; copy += 32) {
        const int row = warp.row + copy / UNITS, unit = copy % UNITS;
        if (first_row + row >= a.q_len) continue;
        u32 pairs[4];
        load_unit(pairs, columns + unit / 8 * Config::M * 128 + unit_offset(row, unit % 8));
        u16* to = base + i64(first_row + row) * a.out_row + 8 * unit;
        if (a.out_aligned && 8 * unit + 8 <= head_dim_v) {
            *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (8 * unit + c < head_dim_v) to[c] = u16(pairs[c / 2] >> 16 * (c % 2));
        }
    }
}

__device__ __forceinline__ void forward(const Arguments& a) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int Q_BYTES = Tile<Config::M, (Config::D > Config::DV ? Config::D : Config::DV)>::BYTES;
    constexpr int K_BYTES = Tile<Config::BN, Config::D>::BYTES;
    const u32 q_tile = shared_address(shared);
    const u32 k_tile = q_tile + Q_BYTES, v_tile = k_tile + K_BYTES;
    const u32 given = v_tile + Tile<Config::BN, Config::DV>::BYTES;  // weights of each warp, for its other side
    __shared__ Exchange exchange;

    // Phases count tiles. Full: every thread's part of a tile has come. Free: every thread has read it. One of a warp could
    // say so for all; that they all do costs little, and lets racecheck see the order.
    __shared__ u64 barriers[4];
    const u32 k_full = shared_address(barriers), v_full = k_full + 8, k_free = k_full + 16, v_free = k_full + 24;
    if (threadIdx.x == 0) {
        barrier_init(k_full, Config::THREADS), barrier_init(v_full, Config::THREADS);
        barrier_init(k_free, Config::THREADS), barrier_init(v_free, Config::THREADS);
    }
    Work work;
    work.find(a);
    __shared__ Work kept;  // the loop has no registers to spare; it reads these early, where they hide their latency
    if (threadIdx.x == 0) kept = work;
    int tile = work.end - 1;
    bool more = tile >= work.begin;
    if (more) {
        load_tile<Config, Config::M, Config::D>(q_tile, work.q, a.q_row, work.first_row, work.q_len, a.head_dim);
        load_tile<Config, Config::BN, Config::D>(k_tile, work.k, a.k_row, tile * Config::BN, work.kv_len, a.head_dim);
    }
    __syncthreads();  // the barriers and kept have been written
    if (more) arrive_loaded<Config>(k_full);

    const Warp warp;
    OutTiles out;
    RowValues tops, totals;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r) {
#pragma unroll
        for (int n = 0; n < Config::COLUMNS / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[r][n][e] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) tops[r][half] = a.unseen, totals[r][half] = 0.f;
    }

    const int first_key = warp.side * Config::KEYS;  // in a tile
    const u32 q_rows = q_tile + 128 * warp.row, k_rows = k_tile + 128 * first_key;
    const u32 v_columns = v_tile + warp.side * (Config::COLUMNS / 64) * Config::BN * 128;

    bool huge = false;
    for (u32 parity = 0; more; --tile, parity ^= 1) {
        more = tile > kept.begin;
        const u16* v = kept.v;
        int kv_len = kept.kv_len;
        const bool clean = tile < kept.clean_end && (!Config::BOUNDED || tile >= kept.clean_begin);
        barrier_wait(k_full, parity);
        barrier_wait(v_free, parity ^ 1);  // of the tile before
        load_tile<Config, Config::BN, Config::DV>(v_tile, v, a.v_row, tile * Config::BN, kv_len, a.head_dim_v);
        arrive_loaded<Config>(v_full);
        ScoreTiles scores;
        clear(scores);
#pragma unroll Config::UNROLL
        for (int step = 0; step < Config::D / 16; ++step) multiply_step(scores, q_rows, k_rows, step);
        if (Config::SOFTCAP || a.prepare) prepare_scores(scores, a.premultiply);
        if (!clean)
            hide_keys(scores, tile * Config::BN + first_key, kept.kv_len,
                      kept.first_row + warp.row + threadIdx.x % 32 / 4 + kept.diagonal, a.left, a.right);
        RowValues found;
        const bool was_huge = huge;
        huge = find_references(scores, tops, found, a, warp, exchange);
        if (huge != was_huge) change_references(out, totals, tops, a.factor, huge);
        if (huge) subtract_references(scores, found);
        barrier_arrive(k_free);  // sooner takes registers
        const u16* k = kept.k;
        kv_len = kept.kv_len;
        exponentiate(scores, out, totals, tops, found, a.factor, huge);
        copy(tops, found);
        Weights weights;
        pack_weights(weights, scores);
        if (Config::SIDES == 2) {
            give_weights(weights, given + threadIdx.x / 32 * WEIGHT_BYTES);
            pair_sync(1 + warp.pair());  // both have given theirs; the next swap comes after both have taken them
        }
        if (more) {
            barrier_wait(k_free, parity);
            load_tile<Config, Config::BN, Config::D>(k_tile, k, a.k_row, (tile - 1) * Config::BN, kv_len, a.head_dim);
            arrive_loaded<Config>(k_full);
        }
        barrier_wait(v_full, parity);
        multiply_weights_and_values(out, weights, v_columns + 128 * first_key);
        if (Config::SIDES == 2) {
            take_weights(weights, given + (threadIdx.x / 32 ^ 1) * WEIGHT_BYTES);
            multiply_weights_and_values(out, weights, v_columns + 128 * (Config::KEYS - first_key));
        }
        barrier_arrive(v_free);
    }
    store_rows(a, out, tops, totals, kept, q_tile, warp, exchange);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::THREADS, cuflash::Config::BLOCKS)
    CONFIG_NAME(const cuflash::Arguments arguments) {
    cuflash::forward(arguments);
}
