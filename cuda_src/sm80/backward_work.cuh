// Which keys of which head a block of the main kernel works on, and the tiles of queries that see them.
#pragma once

#include "sm80/backward_config.cuh"

namespace cuflash {

// What a block works on. Blocks of one head lie together, so that they share its queries in the cache; under a causal mask
// those with the most queries come first.
struct KeyWork {
    const u16 *q, *dout;         // of the first head of the group
    const Row* rows;
    float* sums;
    int entry, kv_head, first_key;
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // query tiles that see some of the keys
    int clean_begin, clean_end;  // of those, the ones of which all rows see all of the keys

    __device__ __forceinline__ void find(const Arguments& a) {
        const int kv_heads = a.q_heads / a.group, head_of_all = blockIdx.x / a.key_blocks;
        entry = head_of_all / kv_heads, kv_head = head_of_all % kv_heads;
        first_key = blockIdx.x % a.key_blocks * Config::BN;
        q_len = used_length(a.q_lens, entry, a.q_len);
        kv_len = used_length(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;
        const int head = kv_head * a.group;
        q = a.q + entry * a.q_entry + head * a.q_head;
        dout = a.dout + entry * a.dout_entry + head * a.dout_head;
        const i64 tiles = i64(entry * i64(a.q_heads) + head) * a.row_blocks;
        rows = a.rows + tiles * Config::M;
        sums = a.sums + tiles * (Config::M * Config::D);
        find_tiles(a.left, a.right);
    }

    __device__ __forceinline__ void find_tiles(int left, int right) {
        const int last_key = min(first_key + Config::BN, kv_len) - 1;
        begin = clean_begin = 0;
        end = (q_len + Config::M - 1) / Config::M;
        clean_end = q_len / Config::M;
        if (Config::BOUNDED) {
            begin = max(0, first_key - diagonal - right) / Config::M;
            end = min(end, (max(0, last_key - diagonal + left + 1) + Config::M - 1) / Config::M);
            clean_begin = (max(0, first_key + Config::BN - 1 - diagonal - right) + Config::M - 1) / Config::M;
            clean_end = min(clean_end, max(0, first_key - diagonal + left + 1) / Config::M);
        }
        if (first_key + Config::BN > kv_len) clean_end = 0;
        if (first_key >= kv_len || end < begin) end = begin;
    }
};

// Of the queries that a block goes through: those of each head of the group, one head after another.
struct QueryTile {
    int head, tile;
    __device__ __forceinline__ QueryTile next(const KeyWork& work) const {
        const bool last = tile + 1 == work.end;
        return {head + last, last ? work.begin : tile + 1};
    }
};

}  // namespace cuflash
