// Which keys of which head a block of the main kernel works on, and the tiles of queries that see them.
#pragma once

#include "common/turns.cuh"
#include "sm80/backward_order.cuh"

namespace cuflash {

// What a block works on. Unless that is drawn, blocks of one head lie together, so that they share its queries in the cache;
// under a causal mask those with the most queries come first.
struct KeyWork {
    const u16 *q, *dout;         // of the first head of the group
    const Row* rows;
    float* sums;
    int entry, kv_head, first_key;
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // query tiles that see some of the keys
    int clean_begin, clean_end;  // of those, the ones of which all rows see all of the keys
    bool rises;                  // DETERMINISTIC: the order of keys

    __device__ __forceinline__ void find(const Arguments& a) {
        if (Config::DETERMINISTIC) {
            const KeyOrder drawn(atomicAdd(a.counters, 1), a);
            rises = drawn.rises;
            find(a, drawn.head_of_all, drawn.keys);
        } else {
            find(a, blockIdx.x / a.key_blocks, blockIdx.x % a.key_blocks);
        }
    }

    __device__ __forceinline__ void find(const Arguments& a, int head_of_all, int keys) {
        const int kv_heads = a.q_heads / a.group;
        entry = head_of_all / kv_heads, kv_head = head_of_all % kv_heads;
        first_key = keys * Config::BN;
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

// Of the queries that a block goes through: those of each head of the group, one head after another. DETERMINISTIC, a
// tile of each head before the next tile, so that blocks come to a tile of any head in the order of their turns.
struct QueryTile {
    int head, tile;
    __device__ __forceinline__ static QueryTile first(const KeyWork& work) {
        return {0, Config::DETERMINISTIC && work.rises ? work.end - 1 : work.begin};
    }
    __device__ __forceinline__ QueryTile next(const KeyWork& work, const Arguments& a) const {
        if (Config::DETERMINISTIC) {
            const bool last = head + 1 == a.group;
            return {last ? 0 : head + 1, last ? tile + (work.rises ? -1 : 1) : tile};
        }
        const bool last = tile + 1 == work.end;
        return {head + last, last ? work.begin : tile + 1};
    }

    // Which counter a warp's turns at its part of dQ have, and the turn there.
    __device__ __forceinline__ u32 counter(const KeyWork& work, const Arguments& a) const {
        const u32 head_of_all = work.entry * a.q_heads + work.kv_head * a.group + head;
        return FIRST_TURN + (head_of_all * a.row_blocks + tile) * Config::WARPS + threadIdx.x / 32;
    }
    __device__ __forceinline__ u32 turn(const KeyWork& work, const Arguments& a) const {
        return turn_of(work.rises, work.first_key / Config::BN, tile, work.kv_len, work.diagonal, a.left, a.right);
    }
};

}  // namespace cuflash
