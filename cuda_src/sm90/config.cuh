// What a kernel is compiled for, what it is called with, and where things lie in shared memory.
#pragma once

#include "common/ptx_hopper.cuh"
#include "common/ring.cuh"

namespace cuflash {

struct Config {
    typedef CONFIG_QK_ELEMENT QkElement;    // of Q and K
    typedef CONFIG_V_ELEMENT VElement;      // of weights and V
    typedef CONFIG_OUT_ELEMENT OutElement;  // 16 bits
    static constexpr bool EIGHT = CONFIG_BITS == 8;  // of what is multiplied
    static constexpr int ITEM = CONFIG_BITS / 8;
    static constexpr int D = CONFIG_HEAD_DIM;  // buckets at or above the true dims; tensor copies fill up with zeros
    static constexpr int DV = CONFIG_HEAD_DIM_V;
    static constexpr int BN = CONFIG_KEYS;
    static constexpr bool FIRST = EIGHT && CONFIG_FIRST;  // 8 bits: the values of the first two tiles of keys come in 16
    static constexpr bool LAGGING = CONFIG_LAGGING;     // 8 bits: references stay for a while; else each of those keys' own
    static constexpr int GROUPS = CONFIG_GROUPS;        // warpgroups that multiply, 64 query rows each
    static constexpr int STAGES = CONFIG_STAGES;        // tiles of K, and of V, in flight
    static constexpr int CLUSTER = CONFIG_CLUSTER;      // blocks that share loads of K and V
    static constexpr int RESIDENT = CONFIG_RESIDENT;    // blocks on a multiprocessor
    static constexpr bool OVERLAP = RESIDENT == 1;      // products beside softmax in a warpgroup; else another block's are
    static constexpr bool PING_PONG = CONFIG_PING_PONG;  // warpgroups take turns to issue products
    static constexpr bool OUT_IN_PLACE = CONFIG_OUT_IN_PLACE;  // of V's last two tiles; else it has a buffer of its own
    static constexpr bool BOUNDED = CONFIG_BOUNDED;        // causal or window
    static constexpr bool DYNAMIC = CONFIG_DYNAMIC;        // work by tickets drawn, else by a static stride
    static constexpr bool SKIPS = BOUNDED && BN < 64 * GROUPS;  // some warpgroups have tiles that they pass over
    static constexpr bool LEFT = CONFIG_LEFT;              // a window with a left bound
    static constexpr int SCORES = CONFIG_SCORES;           // 0: as they are; 1: multiplied first; 2: capped too
    static constexpr bool LENGTHS = CONFIG_LENGTHS;        // of each batch entry

    static constexpr int THREADS = 128 * (GROUPS + 1);
    // Shared memory holds panels of so many bytes a row: 128, or 64 where a head or a tile has no whole number of those.
    // V of 8 bits lies with channels as rows, since products of 8 bits take both factors that way.
    static constexpr int QK_ROW = EIGHT ? (D % 128 == 0 ? 128 : 64) : D % 64 == 0 && DV % 64 == 0 ? 128 : 64;
    static constexpr int V_ROW = EIGHT ? 64 : QK_ROW;
    static constexpr int OUT_ROW = EIGHT ? 128 : QK_ROW;
    static constexpr int QK_PANEL = QK_ROW / ITEM, V_PANEL = V_ROW / ITEM, OUT_PANEL = OUT_ROW / 2;
    static constexpr int V_COLUMNS = EIGHT ? BN : DV, V_ROWS = EIGHT ? DV : BN;  // of a tile
    static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24;
    static constexpr int CONSUMER_REGISTERS = RESIDENT == 2 ? 104 : GROUPS == 4 ? 112 : GROUPS == 3 ? 160 : 240;
    static constexpr float STALE = 8.f;  // references stay until scores outgrow them by 2^8, which P and sums hold
};
static_assert(Config::GROUPS == 2 || Config::GROUPS <= 4 && Config::RESIDENT == 1, "as many as registers allow");
static_assert(Config::RESIDENT == 1 || Config::RESIDENT == 2 && !Config::PING_PONG, "turns are for the one block");
static_assert(Config::D % Config::QK_PANEL == 0 && Config::DV % Config::OUT_PANEL == 0, "whole panels");
static_assert(Config::V_COLUMNS % Config::V_PANEL == 0, "whole panels");
static_assert(Config::BN % 16 == 0 && Config::BN / Config::CLUSTER % 8 == 0, "whole steps, whole swizzles");
static_assert(!Config::EIGHT || Config::BN == 64 && Config::CLUSTER == 1 && Config::SCORES == 0 && Config::RESIDENT == 1 &&
                                    !Config::PING_PONG && !Config::OUT_IN_PLACE, "what walk8.cuh does");
static_assert(Config::CLUSTER == 1 || !Config::DYNAMIC, "the blocks of a pair would have to agree on a ticket");

struct __align__(64) Arguments {
    TensorMap q, k, v, out;  // (columns, heads, rows, entries)
    TensorMap first;         // of 16 bits beside 8: the values of the first two tiles of keys, less v_means, in units of v_scales
    float* lse;              // (entries, q_heads, q_len), or null
    const i64* q_lens;       // or null
    const i64* kv_lens;      // or null
    u32* counter;            // 0 before and after, where work is DYNAMIC
    const float* q_scales;   // of 8 bits: (entries, q_heads, q_len)
    const float* k_scales;   // (entries, kv_heads, key_blocks, 4): of 64 keys, those that a thread of a quad holds
    const float* v_scales;   // (entries, kv_heads, DV)
    const float* v_means;    // (entries, kv_heads, DV): what is added to out
    const float* lse_shifts; // (entries, q_heads, q_len): what scores lack, before they are scaled; or null
    int q_heads, group, q_len, kv_len, key_blocks;
    int pack;                // heads of a group that lie side by side, row by row, in what a warpgroup works on
    int rows;                // of each of them: 64 / pack
    int inverse_pack;        // 2^16 / pack, rounded up: line * inverse_pack >> 16 is line / pack for lines up to 63
    int packs, all_packs;    // of an entry, of all
    int row_tiles;           // of a pack: GROUPS * rows for each block of a cluster
    int tickets;             // row_tiles * all_packs
    int section;             // packs whose K and V lie in the L2 cache together
    int left, right;         // window bounds, large for none
    int top_left;
    float factor;            // of a score, to log2 units
    float premultiply;       // of a raw score before that, where SCORES says so
    float unseen;            // largest score of a row that has seen no key: finite, so that hidden scores weigh 0
};
static_assert(sizeof(Arguments) == 832, "the fields and sizes in families/sm90.py");

// Byte offsets in dynamic shared memory.
struct Shared {
    static constexpr u32 Q_GROUP = 64 * Config::D * Config::ITEM, O_GROUP = 64 * Config::DV * 2;
    static constexpr u32 K_STAGE = Config::BN * Config::D * Config::ITEM, V_STAGE = Config::BN * Config::DV * Config::ITEM;
    static constexpr u32 q = 0, k = q + Config::GROUPS * Q_GROUP, v = k + Config::STAGES * K_STAGE;
    static constexpr u32 after = v + Config::STAGES * V_STAGE;
    static constexpr u32 o = after;
    static constexpr u32 first = after + (Config::OUT_IN_PLACE ? 0 : Config::GROUPS * O_GROUP);  // panels of 64 columns
    static constexpr u32 FIRST_PANEL = 2 * Config::BN * 128;
    static constexpr u32 works = first + (Config::FIRST ? Config::DV / 64 * FIRST_PANEL : 0);  // two records
    static constexpr u32 barriers = works + 128;
    static constexpr u32 k_full = barriers, k_empty = k_full + 8 * Config::STAGES;
    static constexpr u32 v_full = k_empty + 8 * Config::STAGES, v_empty = v_full + 8 * Config::STAGES;
    static constexpr u32 q_full = v_empty + 8 * Config::STAGES, q_empty = q_full + 8 * Config::GROUPS;
    static constexpr u32 work_full = q_empty + 8 * Config::GROUPS, work_empty = work_full + 16;
    static constexpr u32 first_full = work_empty + 16, first_empty = first_full + 8;
    static constexpr u32 out_gone = first_empty + 8;  // of each warpgroup
    static constexpr u32 BYTES = works + 1024;
    static_assert(out_gone + 8 * Config::GROUPS <= BYTES, "barriers and records");
    static_assert(Q_GROUP % 512 == 0 && K_STAGE % 1024 == 0 && V_STAGE % 1024 == 0 && O_GROUP % 512 == 0, "swizzles");
    static_assert(!Config::OUT_IN_PLACE || Config::GROUPS == 2 && Config::STAGES == 2 && O_GROUP <= V_STAGE,
                  "a tile's place for each warpgroup");
    static_assert(BYTES == CONFIG_SHARED_MEMORY && BYTES <= (Config::RESIDENT == 2 ? 115712 : 232448),
                  "what a block is launched with, and may have");
};

}  // namespace cuflash
