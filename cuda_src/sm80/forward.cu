// Attention forward for compute capability 8.0 and newer: FlashAttention-2 (Dao 2023, section 3) on mma.sync.
//
// A block owns M query rows of one head, a warp M / WARPS of them in whole rows, so softmax needs no shared memory.
// Key tiles run from the last to the first: tiles that a mask or the end of the keys cuts come first or last, and only
// those are masked. Loads are asynchronous, STAGES tiles of K and V ahead; while a block waits for a softmax, another
// block of the same multiprocessor multiplies.
//
// Budget a thread, in registers:  S = ROW_TILES * BN / 2,  O = ROW_TILES * DV / 2,  about 45 beside them; 255 at most.
// Shared memory, in bytes:        2 * (M * max(D, DV) + STAGES * BN * (D + DV)), D and DV rounded up to 64 columns.
//
// Scores live in units of log2: weight = 2^(s * factor - top), where top is a multiple of factor within 8 of the row's
// largest. Any reference serves, since numerator and denominator share it; a stale one saves the rescaling of O, and
// keeps weights at or below 2^8, which 16 bits and float32 sums hold.

#include "common/ptx_ampere.cuh"

namespace cuflash {

struct Config {
    typedef CONFIG_ELEMENT Element;
    static constexpr int D = CONFIG_HEAD_DIM;      // multiples of 16 at or above the true dims
    static constexpr int DV = CONFIG_HEAD_DIM_V;
    static constexpr int M = CONFIG_Q_ROWS;
    static constexpr int BN = CONFIG_KEYS;
    static constexpr int WARPS = CONFIG_WARPS;
    static constexpr int BLOCKS = CONFIG_BLOCKS;   // of one multiprocessor, to divide the registers by
    static constexpr int STAGES = CONFIG_STAGES;
    static constexpr int UNROLL = CONFIG_UNROLL;   // steps of Q Kᵀ: more hide latency, fewer spare registers
    static constexpr bool OVERLAP = CONFIG_OVERLAP;  // scores of the next tile among the exponentials of this one
    static constexpr bool BOUNDED = CONFIG_BOUNDED;  // causal or window
    static constexpr bool SOFTCAP = CONFIG_SOFTCAP;
    static constexpr bool ALIGNED = CONFIG_ALIGNED;  // rows start on 16 bytes and have a multiple of 8 columns
    static constexpr int COPIES = ALIGNED ? 16 : 1;  // to unroll: element by element they hold registers
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int ROW_TILES = M / (16 * WARPS);
    static constexpr float STALE = 8.f;
};
static_assert(Config::M == 16 * Config::WARPS * Config::ROW_TILES, "whole tiles of 16 rows for each warp");
static_assert(Config::D % 32 == 0 && Config::DV % 32 == 0 && Config::BN % 16 == 0, "whole panels and products");

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
    int prepare, out_aligned;
};
static_assert(sizeof(Arguments) == 208, "the fields and sizes in families/sm80.py");

// A tile of 16-bit elements in shared memory: panels of 64 columns, whose 16-byte units are swizzled so that the 8 rows
// of a matrix load fall into different banks.
template <int ROWS, int COLUMNS>
struct Tile {
    static constexpr int BYTES = 2 * ROWS * ((COLUMNS + 63) / 64 * 64);
};

__device__ __forceinline__ int used_length(const i64* lens, int entry, int capacity) {
    if (lens == nullptr) return capacity;
    const i64 length = lens[entry];  // not checked on the host when it lives on the device
    return length < 0 ? 0 : length > capacity ? capacity : int(length);
}

// Where a lane points a matrix load: row of a tile, and which of the two units of a 16-column step. Step t of a panel
// is then `^ 32 * t`, since tiles start on 128 bytes.
__device__ __forceinline__ u32 lane_offset(int row, int unit) { return 128 * row + 16 * (unit ^ (row % 8)); }

template <int ROWS>
__device__ __forceinline__ u32 step_address(u32 lane_address, int step) {
    return (lane_address ^ (32 * (step % 4))) + step / 4 * ROWS * 128;
}

// Rows first_row.. of a matrix into a tile, a panel of WIDTH units (16 bytes) a row after another. What lies beyond `rows`
// or `columns` becomes 0, whatever memory holds there.
template <int ROWS, int WIDTH>
__device__ __forceinline__ void load_panel(u32 panel, const u16* matrix, i64 step, int first_row, int rows,
                                           int columns) {
    constexpr int PASS = Config::THREADS / WIDTH;  // rows that the block copies at a time
    static_assert(PASS % 8 == 0, "each thread keeps its place in the swizzle");
    const int unit = threadIdx.x % WIDTH;
    int row = first_row + threadIdx.x / WIDTH;
    u32 to = panel + lane_offset(threadIdx.x / WIDTH, unit);
    const u16* from = matrix + row * step + 8 * unit;
#pragma unroll Config::COPIES
    for (int i = 0; i < (ROWS + PASS - 1) / PASS; ++i, row += PASS, to += 128 * PASS, from += PASS * step) {
        if (ROWS % PASS != 0 && i * PASS + threadIdx.x / WIDTH >= ROWS) break;
        if (Config::ALIGNED) {
            const bool whole = row < rows && 8 * unit < columns;
            copy_async(to, whole ? from : matrix, whole ? 16 : 0);
            continue;
        }
        u32 pairs[4];
#pragma unroll
        for (int c = 0; c < 8; c += 2) {
            const u32 low = row < rows && 8 * unit + c < columns ? from[c] : 0;
            const u32 high = row < rows && 8 * unit + c + 1 < columns ? from[c + 1] : 0;
            pairs[c / 2] = low | high << 16;
        }
        store_unit(to, pairs);
    }
}

template <int ROWS, int COLUMNS>
__device__ __forceinline__ void load_tile(u32 tile, const u16* matrix, i64 step, int first_row, int rows, int columns) {
#pragma unroll Config::COPIES
    for (int panel = 0; panel < COLUMNS / 64; ++panel)
        load_panel<ROWS, 8>(tile + panel * ROWS * 128, matrix + 64 * panel, step, first_row, rows, columns - 64 * panel);
    if constexpr (COLUMNS % 64 != 0)
        load_panel<ROWS, 4>(tile + COLUMNS / 64 * ROWS * 128, matrix + COLUMNS / 64 * 64, step, first_row, rows,
                            columns - COLUMNS / 64 * 64);
}

// Accumulators of a warp: 16-row tiles x 8-column tiles. Lane l holds rows l / 4 and l / 4 + 8 of each, columns
// 2 * (l % 4) and the next: elements 0 and 1 of the first row, 2 and 3 of the second.
typedef float ScoreTiles[Config::ROW_TILES][Config::BN / 8][4];
typedef float OutTiles[Config::ROW_TILES][Config::DV / 8][4];
typedef float RowValues[Config::ROW_TILES][2];

__device__ __forceinline__ void clear(ScoreTiles& scores) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < Config::BN / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) scores[r][n][e] = 0.f;
}

// scores += Q Kᵀ over one step of 16 columns; the addresses are those that a lane loads matrices from.
__device__ __forceinline__ void multiply_step(ScoreTiles& scores, u32 q_lane, u32 k_lane, int step) {
    u32 q[Config::ROW_TILES][4];
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r) load_matrices(q[r], step_address<Config::M>(q_lane, step) + 2048 * r);
#pragma unroll
    for (int n = 0; n < Config::BN / 16; ++n) {
        u32 k[4];
        load_matrices(k, step_address<Config::BN>(k_lane, step) + 2048 * n);
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r) {
            multiply(scores[r][2 * n], q[r], k[0], k[1], Config::Element());
            multiply(scores[r][2 * n + 1], q[r], k[2], k[3], Config::Element());
        }
    }
}

// out += P V, the weights rounded to 16 bits on the way
__device__ __forceinline__ void multiply_weights_and_values(OutTiles& out, const ScoreTiles& weights, u32 v_tile) {
    const int lane = threadIdx.x % 32;
    const u32 v_lane = v_tile + lane_offset(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < Config::BN / 16; ++step) {
        u32 p[Config::ROW_TILES][4];
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r) {
            const float(&left)[4] = weights[r][2 * step];
            const float(&right)[4] = weights[r][2 * step + 1];
            p[r][0] = pack(left[0], left[1], Config::Element());
            p[r][1] = pack(left[2], left[3], Config::Element());
            p[r][2] = pack(right[0], right[1], Config::Element());
            p[r][3] = pack(right[2], right[3], Config::Element());
        }
#pragma unroll
        for (int n = 0; n < Config::DV / 16; ++n) {
            u32 v[4];
            load_matrices_transposed(v, step_address<Config::BN>(v_lane, n) + 2048 * step);
#pragma unroll
            for (int r = 0; r < Config::ROW_TILES; ++r) {
                multiply(out[r][2 * n], p[r], v[0], v[1], Config::Element());
                multiply(out[r][2 * n + 1], p[r], v[2], v[3], Config::Element());
            }
        }
    }
}

// tanh by two approximate instructions of relative error 2^-22; tanh.approx has 2^-11, too coarse for a capped score.
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.f - __fdividef(2.f, 1.f + exp2_approx(2.885390082f * x));
}

// What has to happen to raw scores before the softmax, beside the plain factor that exp2 folds in.
__device__ __forceinline__ void prepare_scores(ScoreTiles& scores, float premultiply) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < Config::BN / 8; ++n)
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
            for (int n = 0; n < Config::BN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < low || 8 * n + e > high) scores[r][n][2 * half + e] = minus_infinity();
        }
}

// What is subtracted from a score in log2 units. A row that has seen no key has no reference yet: any finite one makes
// its weights 0.
__device__ __forceinline__ float reference(float top, float factor) {
    return top == minus_infinity() ? 0.f : top * factor;
}

// Moves the reference of each row whose scores have outgrown it, and totals and out with it. Says whether the scores are
// differences to the reference already.
__device__ __forceinline__ bool move_references(ScoreTiles& scores, OutTiles& out, RowValues& tops, RowValues& totals,
                                                float factor) {
    RowValues rescale;
    bool moves = false, huge = false;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = scores[r][0][2 * half];
#pragma unroll
            for (int n = 0; n < Config::BN / 8; ++n)
                top = fmaxf(top, fmaxf(scores[r][n][2 * half], scores[r][n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float old = tops[r][half];
            const bool move = (top - old) * factor > Config::STALE || (old == minus_infinity() && top > old);
            rescale[r][half] = 1.f;
            if (move) {
                rescale[r][half] = exp2_approx((old - top) * factor);
                tops[r][half] = top;
            }
            moves |= move;
            huge |= fabsf(reference(tops[r][half], factor)) > 16777216.f;
        }
    if (__any_sync(~0u, moves)) {
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                totals[r][half] *= rescale[r][half];
#pragma unroll
                for (int n = 0; n < Config::DV / 8; ++n) {
                    out[r][n][2 * half] *= rescale[r][half];
                    out[r][n][2 * half + 1] *= rescale[r][half];
                }
            }
    }
    // Beyond 2^24 the product with the factor is off by more than 1, so the difference has to come first.
    const bool difference_first = __any_sync(~0u, huge);
    if (difference_first) {
#pragma unroll
        for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float top = reference(tops[r][half], 1.f);
#pragma unroll
                for (int n = 0; n < Config::BN / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) scores[r][n][2 * half + e] -= top;
            }
    }
    return difference_first;
}

// Scores of the 8-column tiles [first, last) become weights, and join the row sums.
__device__ __forceinline__ void exponentiate(ScoreTiles& scores, RowValues& totals, const RowValues& tops, float factor,
                                             bool difference_first, int first, int last) {
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float offset = difference_first ? 0.f : reference(tops[r][half], factor);
#pragma unroll
            for (int n = first; n < last; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = scores[r][n][2 * half + e];
                    score = exp2_approx(score * factor - offset);
                    totals[r][half] += score;
                }
        }
}

// Divide by the row sums and write, through the shared memory of Q: each warp its own rows.
__device__ __forceinline__ void store_rows(const Arguments& a, OutTiles& out, RowValues& tops, RowValues& totals,
                                           u32 tile, int entry, int head, int first_row, int warp_row, int q_len) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = totals[r][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            const int row = warp_row + 16 * r + 8 * half + lane / 4;
            const bool used = first_row + row < q_len;
            const float inverse = total == 0.f || !used ? 0.f : 1.f / total;
            const bool dead = total == 0.f || !used;  // 0 even where sums are not finite
            if (a.lse != nullptr && lane % 4 == 0 && first_row + row < a.q_len) {
                // log2 of a sum and a top in log2 units; ln 2 turns both to natural ones
                const float top = tops[r][half] * a.factor;
                a.lse[(i64(entry) * a.q_heads + head) * a.q_len + first_row + row] =
                    dead ? minus_infinity() : 0.693147181f * (top + __log2f(total));
            }
#pragma unroll
            for (int n = 0; n < Config::DV / 8; ++n) {
                const float x = dead ? 0.f : out[r][n][2 * half] * inverse;
                const float y = dead ? 0.f : out[r][n][2 * half + 1] * inverse;
                const u32 pair = pack(x, y, Config::Element());
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(tile + n / 8 * Config::M * 128 + lane_offset(row, n % 8) + 4 * (lane % 4)),
                             "r"(pair)
                             : "memory");
            }
        }
    __syncwarp();
    constexpr int UNITS = Config::DV / 8;
    constexpr int ROWS = 16 * Config::ROW_TILES;
    u16* base = a.out + entry * a.out_entry + head * a.out_head;
    for (int copy = lane; copy < ROWS * UNITS; copy += 32) {
        const int row = warp_row + copy / UNITS, unit = copy % UNITS;
        if (first_row + row >= a.q_len) continue;
        u32 pairs[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
                     : "r"(tile + unit / 8 * Config::M * 128 + lane_offset(row, unit % 8))
                     : "memory");
        u16* to = base + i64(first_row + row) * a.out_row + 8 * unit;
        if (a.out_aligned && 8 * unit + 8 <= a.head_dim_v) {
            *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
            for (int c = 0; c < 8; ++c)
                if (8 * unit + c < a.head_dim_v) to[c] = u16(pairs[c / 2] >> 16 * (c % 2));
        }
    }
}

__device__ __forceinline__ void forward(const Arguments& a) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int Q_BYTES = Tile<Config::M, (Config::D > Config::DV ? Config::D : Config::DV)>::BYTES;
    constexpr int K_BYTES = Tile<Config::BN, Config::D>::BYTES;
    constexpr int V_BYTES = Tile<Config::BN, Config::DV>::BYTES;
    const u32 q_tile = shared_address(shared);
    const u32 k_tiles = q_tile + Q_BYTES, v_tiles = k_tiles + Config::STAGES * K_BYTES;

    // Blocks of one head lie together, so that they share its keys in the cache; the longest rows first.
    const int head_of_all = blockIdx.x / a.row_blocks;
    const int entry = head_of_all / a.q_heads, head = head_of_all % a.q_heads;
    const int first_row = (a.row_blocks - 1 - int(blockIdx.x % a.row_blocks)) * Config::M;
    const int q_len = used_length(a.q_lens, entry, a.q_len);
    const int kv_len = used_length(a.kv_lens, entry, a.kv_len);
    const int diagonal = a.top_left ? 0 : kv_len - q_len;
    const int last_row = min(first_row + Config::M, q_len) - 1;

    // Key tiles [begin, end) that some row sees, and of those [clean_begin, clean_end) that all rows see whole.
    int begin = 0, end = (kv_len + Config::BN - 1) / Config::BN;
    int clean_begin = 0, clean_end = kv_len / Config::BN;
    if (Config::BOUNDED) {
        begin = max(0, first_row + diagonal - a.left) / Config::BN;
        end = min(end, (max(0, last_row + diagonal + a.right + 1) + Config::BN - 1) / Config::BN);
        clean_begin = (max(0, first_row + Config::M - 1 + diagonal - a.left) + Config::BN - 1) / Config::BN;
        clean_end = min(clean_end, max(0, first_row + diagonal + a.right + 1) / Config::BN);
    }
    if (first_row >= q_len) end = begin;

    const u16* k = a.k + entry * a.k_entry + (head / a.group) * a.k_head;
    const u16* v = a.v + entry * a.v_entry + (head / a.group) * a.v_head;
    const int tiles = max(0, end - begin);
    auto load_keys = [&](int i) {  // tile i of the loop, counted from the last
        if (i < tiles)
            load_tile<Config::BN, Config::D>(k_tiles + i % Config::STAGES * K_BYTES, k, a.k_row,
                                             (end - 1 - i) * Config::BN, kv_len, a.head_dim);
        commit_copies();
    };
    auto load_values = [&](int i) {
        if (i < tiles)
            load_tile<Config::BN, Config::DV>(v_tiles + i % Config::STAGES * V_BYTES, v, a.v_row,
                                              (end - 1 - i) * Config::BN, kv_len, a.head_dim_v);
        commit_copies();
    };

    if (tiles > 0)
        load_tile<Config::M, Config::D>(q_tile, a.q + entry * a.q_entry + head * a.q_head, a.q_row, first_row, q_len,
                                        a.head_dim);
    load_keys(0);  // one group with Q
#pragma unroll
    for (int i = 1; i < Config::STAGES; ++i) {
        load_values(i - 1);
        load_keys(i);
    }

    const int warp_row = threadIdx.x / 32 * 16 * Config::ROW_TILES;
    OutTiles out;
    RowValues tops, totals;
#pragma unroll
    for (int r = 0; r < Config::ROW_TILES; ++r) {
#pragma unroll
        for (int n = 0; n < Config::DV / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[r][n][e] = 0.f;
#pragma unroll
        for (int half = 0; half < 2; ++half) tops[r][half] = minus_infinity(), totals[r][half] = 0.f;
    }

    const int lane = threadIdx.x % 32;
    const u32 q_lane = q_tile + lane_offset(warp_row + lane % 16, lane / 16);
    const u32 k_lane = k_tiles + lane_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    auto mask = [&](ScoreTiles& scores, int i) {
        const int tile = end - 1 - i;
        if (Config::SOFTCAP || a.prepare) prepare_scores(scores, a.premultiply);
        if (tile >= clean_end || tile < clean_begin)
            hide_keys(scores, tile * Config::BN, kv_len, first_row + warp_row + lane / 4 + diagonal, a.left, a.right);
    };

    if (Config::OVERLAP) {
        // The products of the next tile's scores run among the exponentials of this one's.
        auto turn = [&](ScoreTiles& scores, ScoreTiles& next, int i) {
            const bool difference_first = move_references(scores, out, tops, totals, a.factor);
            wait_copies<2 * (Config::STAGES > 2 ? Config::STAGES - 2 : 0)>();
            __syncthreads();  // V of this tile and K of the next have come; K of this, V of the last have been used
            load_keys(i + Config::STAGES);
            load_values(i + Config::STAGES - 1);
            clear(next);
            const u32 next_keys = k_lane + (i + 1) % Config::STAGES * K_BYTES;
            constexpr int STEPS = Config::D / 16, COLUMNS = Config::BN / 8;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                multiply_step(next, q_lane, next_keys, step);
                exponentiate(scores, totals, tops, a.factor, difference_first, step * COLUMNS / STEPS,
                             (step + 1) * COLUMNS / STEPS);
            }
            multiply_weights_and_values(out, scores, v_tiles + i % Config::STAGES * V_BYTES);
            mask(next, i + 1);
        };
        ScoreTiles even, odd;
        if (tiles > 0) {
            wait_copies<2 * (Config::STAGES - 1)>();
            __syncthreads();
            clear(even);
#pragma unroll
            for (int step = 0; step < Config::D / 16; ++step) multiply_step(even, q_lane, k_lane, step);
            mask(even, 0);
        }
        for (int i = 0; i < tiles; i += 2) {
            turn(even, odd, i);
            if (i + 1 < tiles) turn(odd, even, i + 1);
        }
    } else {
        for (int i = 0; i < tiles; ++i) {
            wait_copies<2 * (Config::STAGES - 1)>();
            __syncthreads();  // K of this tile has come; V of the tile before has been used by all
            load_values(i + Config::STAGES - 1);
            ScoreTiles scores;
            clear(scores);
#pragma unroll Config::UNROLL
            for (int step = 0; step < Config::D / 16; ++step)
                multiply_step(scores, q_lane, k_lane + i % Config::STAGES * K_BYTES, step);
            mask(scores, i);
            const bool difference_first = move_references(scores, out, tops, totals, a.factor);
            exponentiate(scores, totals, tops, a.factor, difference_first, 0, Config::BN / 8);
            wait_copies<2 * (Config::STAGES - 1)>();
            __syncthreads();  // V of this tile has come; K of this tile has been used by all
            load_keys(i + Config::STAGES);
            multiply_weights_and_values(out, scores, v_tiles + i % Config::STAGES * V_BYTES);
        }
    }
    wait_copies<0>();
    __syncthreads();  // Q has been used by all: its place takes the rows of out
    store_rows(a, out, tops, totals, q_tile, entry, head, first_row, warp_row, q_len);
}

}  // namespace cuflash

extern "C" __global__ void __launch_bounds__(cuflash::Config::THREADS, cuflash::Config::BLOCKS)
    CONFIG_NAME(const cuflash::Arguments arguments) {
    cuflash::forward(arguments);
}
