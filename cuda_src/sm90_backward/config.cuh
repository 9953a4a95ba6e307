// What the kernels of a backward pass are compiled for, what they are called with, and where things lie in shared memory.
#pragma once

#include "common/ptx_hopper.cuh"
#include "common/ring.cuh"
#include "common/turns.cuh"

namespace cuflash {

enum Share { LINES, COLUMNS };  // of a tile of dQ, that a warpgroup has

struct Config {
    typedef CONFIG_ELEMENT Element;
    static constexpr int D = CONFIG_HEAD_DIM;  // buckets at or above the true dims; tensor copies fill up with zeros
    static constexpr int DV = CONFIG_HEAD_DIM_V;
    static constexpr int BM = CONFIG_Q_ROWS;       // queries of a tile
    static constexpr int GROUPS = CONFIG_GROUPS;   // warpgroups that multiply
    static constexpr bool PARTED = CONFIG_PARTED;  // one has dV, the other dK, of the same 64 keys; else each has 64 of its own
    static constexpr int BN = CONFIG_KEYS;         // keys of a tile
    static constexpr int Q_STAGES = CONFIG_Q_STAGES;    // tiles of Q in flight
    static constexpr int O_STAGES = CONFIG_O_STAGES;    // of dO
    static constexpr int DQ_CHUNKS = CONFIG_DQ_CHUNKS;  // in which a warpgroup's share of dQ is multiplied and handed on
    static constexpr Share SHARE = CONFIG_SHARE;        // of dQ
    static constexpr bool BOUNDED = CONFIG_BOUNDED;     // causal or window
    static constexpr bool LEFT = CONFIG_LEFT;           // a window with a left bound
    static constexpr bool CAPPED = CONFIG_CAPPED;       // softcap
    static constexpr bool LENGTHS = CONFIG_LENGTHS;     // of each batch entry
    static constexpr bool ORDERED = CONFIG_ORDERED;     // tiles of keys add to dQ in one order

    static constexpr int THREADS = 128 * (GROUPS + 1);
    // Shared memory holds panels of so many columns: 64, or 32 where a share of dQ has no whole number of those.
    static constexpr int PANEL = CONFIG_PANEL, ROW = 2 * PANEL;
    static constexpr int DQ_ROWS = SHARE == LINES ? BM / GROUPS : BM, DQ_SHARE = SHARE == COLUMNS ? D / GROUPS : D;
    static constexpr int DQ_COLUMNS = DQ_SHARE / DQ_CHUNKS;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
};
static_assert(Config::GROUPS == 2, "as many as registers allow");
static_assert(Config::BN == (Config::PARTED ? 64 : 64 * Config::GROUPS), "lines of a product are keys");
static_assert(Config::BM == 64 || Config::BM == 128, "columns of a product are queries");
static_assert(Config::D % Config::PANEL == 0 && Config::DV % Config::PANEL == 0, "whole panels");
static_assert(Config::Q_STAGES == 2, "a tile of dS has the slot of its Q");
static_assert(Config::PANEL == 64 || Config::PANEL == 32, "what swizzles span");
static_assert(Config::DQ_ROWS == 64 && Config::DQ_COLUMNS % Config::PANEL == 0, "what one product makes");
static_assert(Config::PARTED || !Config::CAPPED, "the slope of tanh takes registers beside P and dP");

struct __align__(64) Arguments {
    TensorMap q, k, v, dout, dk, dv;  // (columns, heads, rows, entries)
    const void *out, *dout_rows;      // of 16 bits
    const float* lse;
    void* dq;
    const i64* q_lens;    // or null
    const i64* kv_lens;   // or null
    float* row_stats;     // workspace: LSE in units of log2 for each row of each tile of queries, then what dP lacks
    float* sums;          // dQ before it is rounded, a tile of a head after the other
    u32* counters;        // tickets drawn; from FIRST_TURN on, of each section what is cleared, of each warpgroup of a split
                          // piece of work which parts have ended, and, ORDERED, of each tile of dQ
    float* partials;      // sums of those parts
    i64 out_steps[3], dout_steps[3], lse_steps[3], dq_steps[3];  // elements, along entries, heads and rows
    i64 all_rows;            // of all tiles of queries of all heads
    int q_heads, kv_heads, group, q_len, kv_len, head_dim, head_dim_v;
    int q_tiles;             // of a head
    u32 key_tiles;           // of a head
    u32 all_kv_heads;        // of all entries
    u32 tickets;             // pieces of work, key_tiles * all_kv_heads, but each of their parts
    u32 whole, parts;        // pieces that are whole, the first; of each other how many parts
    u32 section;             // kv heads whose queries lie in the L2 cache together
    u32 sections;            // of so many, the last of maybe less, are set to 0 one after the other; 1: all are at first
    u32 sweep;               // tiles of keys of a head that are at work at a time
    int left, right;         // window bounds, large for none
    int top_left;
    float premultiply;       // of a raw score: before tanh, where CAPPED
    float factor;            // after it, to log2 units
    float scale;             // of dQ and dK
};
__device__ __forceinline__ u32* first_split(const Arguments& a) { return a.counters + FIRST_TURN + a.sections; }
__device__ __forceinline__ u32* first_turn(const Arguments& a) {
    return first_split(a) + (a.key_tiles * a.all_kv_heads - a.whole) * Config::GROUPS;
}
static_assert(sizeof(Arguments) == 1088, "the fields and sizes in families/backward/sm90.py");

// Byte offsets in dynamic shared memory.
struct Shared {
    static constexpr u32 K = Config::BN * Config::D * 2, V = Config::BN * Config::DV * 2;
    static constexpr u32 Q = Config::BM * Config::D * 2, O = Config::BM * Config::DV * 2;  // a stage of Q, of dO
    static constexpr u32 SCORES = Config::BM * Config::BN * 2;                             // a stage of dS
    static constexpr u32 DQ = Config::DQ_ROWS * Config::DQ_COLUMNS * 4;                    // a chunk of a warpgroup's share
    static constexpr u32 STATS = Config::BM * 4;
    static constexpr u32 k = 0, v = k + K, q = v + V, o = q + Config::Q_STAGES * Q, scores = o + Config::O_STAGES * O;
    static constexpr u32 weights = scores + 2 * SCORES;  // PARTED: P in float32, for the warpgroup that has dK
    static constexpr u32 dq = weights + (Config::PARTED ? 2 * SCORES : 0);
    static constexpr u32 lse = dq + Config::GROUPS * DQ, delta = lse + Config::Q_STAGES * STATS;
    static constexpr u32 works = delta + Config::Q_STAGES * STATS;  // two records
    static constexpr u32 q_full = works + 128, q_empty = q_full + 8 * Config::Q_STAGES;
    static constexpr u32 o_full = q_empty + 8 * Config::Q_STAGES, o_empty = o_full + 8 * Config::O_STAGES;
    static constexpr u32 dq_full = o_empty + 8 * Config::O_STAGES;  // two of each warpgroup, ORDERED one for each adder
    static constexpr u32 dq_empty = dq_full + 16 * Config::GROUPS;
    static constexpr u32 k_full = dq_empty + 8 * Config::GROUPS, v_full = k_full + 8;
    static constexpr u32 kv_empty = v_full + 8, work_full = kv_empty + 8, work_empty = work_full + 16;
    static constexpr u32 weights_full = work_empty + 16, weights_empty = weights_full + 8, scores_full = weights_empty + 8;
    static constexpr u32 all = scores_full + 8;  // these four PARTED
    static constexpr u32 last = (all + 8 + 15) / 16 * 16;  // of each warpgroup, whether its part of a piece was the last to come
    static constexpr u32 zeros = works + 512, ZEROS = 1024;
    static constexpr u32 BYTES = zeros + ZEROS;
    static_assert(last + 16 * Config::GROUPS <= zeros, "barriers and records");
    static_assert(K % 1024 == 0 && V % 1024 == 0 && Q % 1024 == 0 && O % 1024 == 0 && SCORES % 1024 == 0, "swizzles");
    static_assert(BYTES == CONFIG_SHARED_MEMORY && BYTES <= 232448, "what a block is launched with, and may have");
};

// Keeps the compiler from working out addresses of all steps ahead of a loop, for which registers lack.
__device__ __forceinline__ void work_out_here(u32& address) { asm volatile("" : "+r"(address)); }

// Orders of a tile's rows and of a share of dQ in the workspace: as the threads of a warpgroup hold them, 16 bytes each.
// Of 16 rows, lane % 4 == i has rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9.
__device__ __forceinline__ constexpr int place_of_row(int row) {
    return row / 16 * 16 + row / 2 % 4 * 4 + row / 8 % 2 * 2 + row % 2;
}

__device__ __forceinline__ int used_length(const i64* lens, int entry, int capacity) {
    if (!Config::LENGTHS || lens == nullptr) return capacity;
    const i64 length = lens[entry];  // not checked on the host when it lives on the device
    return length < 0 ? 0 : length > capacity ? capacity : int(length);
}

}  // namespace cuflash
