// What the kernels of the backward pass are compiled for, and what they are given.
#pragma once

#include "sm80/products.cuh"

namespace cuflash {

// Weights are rounded times 2^this, so that those of long rows keep their digits: none is above 1. What they enter is
// scaled back: sums of dV at the end, dS before it is rounded itself.
constexpr int weight_shift(Float16) { return 12; }
constexpr int weight_shift(Bfloat16) { return 0; }

struct Config {
    typedef CONFIG_ELEMENT Element;
    static constexpr int D = CONFIG_HEAD_DIM;  // multiples of 32 at or above the true dims
    static constexpr int DV = CONFIG_HEAD_DIM_V;
    static constexpr int M = CONFIG_Q_ROWS;
    static constexpr int BN = CONFIG_KEYS;
    static constexpr int WARPS = CONFIG_WARPS;
    static constexpr int BLOCKS = CONFIG_BLOCKS;              // of one multiprocessor, to divide the registers by
    static constexpr int KEY_GROUPS = CONFIG_KEY_GROUPS;      // of warps, that divide the keys of S, dP, dK and dV
    static constexpr int QUERY_GROUPS = CONFIG_QUERY_GROUPS;  // of warps, that divide the rows of dQ
    static constexpr int STAGES = CONFIG_STAGES;              // tiles of Q in shared memory: 1 or 2
    static constexpr int UNROLL = CONFIG_UNROLL;              // steps of S and dP
    static constexpr bool BOUNDED = CONFIG_BOUNDED;           // causal or window
    static constexpr bool SOFTCAP = CONFIG_SOFTCAP;
    static constexpr bool ALIGNED = CONFIG_ALIGNED;  // rows start on 16 bytes and have a multiple of 8 columns
    static constexpr bool DETERMINISTIC = CONFIG_DETERMINISTIC;  // blocks add to dQ in turn
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int SIDES = WARPS / KEY_GROUPS;  // warps of a key group: parts of S's queries, of dK's and dV's columns
    static constexpr int KEYS = BN / KEY_GROUPS, QUERIES = M / SIDES;  // of a warp, in S and dP
    static constexpr int DQ_SIDES = WARPS / QUERY_GROUPS;              // warps of a query group: parts of dQ's columns
    static constexpr int WEIGHT_SHIFT = weight_shift(Element());
};
static_assert(Config::KEYS % 16 == 0 && Config::QUERIES % 16 == 0, "whole products");
static_assert((Config::QUERIES & (Config::QUERIES - 1)) == 0, "a warp's queries are whole units under an XOR");
static_assert(Config::D % 32 == 0 && Config::DV % 32 == 0, "whole panels, or halves of one");

constexpr float SHIFT_BACK = 1.f / (1 << Config::WEIGHT_SHIFT);
constexpr int ROW_THREADS = 256;  // of the kernels that go through rows

// What the main kernel has to know of a row: its LSE in units of log2, less the shift of weights; and sum(dout * out),
// shifted back. A row that sees no key, or does not exist, has +inf there, so that its weights are 0, and 0.
struct Row {
    float lse, delta;
};

// Sums of dQ of a warp: of the blocks of 16 rows of a tile every QUERY_GROUPS-th, of 16 columns every DQ_SIDES-th.
typedef Sums<Config::M / (16 * Config::QUERY_GROUPS), Config::D / (16 * Config::DQ_SIDES)> QuerySums;

struct Arguments {
    const u16 *q, *k, *v, *out, *dout;
    const float* lse;
    u16 *dq, *dk, *dv;
    Row* rows;           // (batch, q_heads, row_blocks * M)
    float* sums;         // of dQ: (batch, q_heads, row_blocks, M * D), a tile as its fragments lie
    u32* counters;       // DETERMINISTIC: tickets drawn; from FIRST_TURN on, turns: (batch, q_heads, row_blocks, WARPS)
    const i64* q_lens;   // or null
    const i64* kv_lens;  // or null
    i64 q_entry, q_head, q_row;  // strides in elements; columns lie next to each other
    i64 k_entry, k_head, k_row;
    i64 v_entry, v_head, v_row;
    i64 out_entry, out_head, out_row;
    i64 dout_entry, dout_head, dout_row;
    i64 dq_entry, dq_head, dq_row;
    i64 dk_entry, dk_head, dk_row;
    i64 dv_entry, dv_head, dv_row;
    i64 lse_entry, lse_head, lse_row;
    int q_heads, group, q_len, kv_len, head_dim, head_dim_v, row_blocks, key_blocks;
    int all_kv_heads, section;  // DETERMINISTIC: kv heads of all entries; those that blocks go through together
    int left, right;    // window bounds, large for none
    int top_left;
    float factor;       // of a score, to log2 units
    float premultiply;  // of a raw score before that, where prepare says so: a scale that is not positive, or scale / cap
    float scale;        // of what dS gives to dQ and dK
    int prepare;
    int out_aligned, dq_aligned, dk_aligned, dv_aligned;  // out: of both that are summed, out and dout
};
static_assert(sizeof(Arguments) == 416, "the fields and sizes in families/backward/sm80.py");

}  // namespace cuflash
