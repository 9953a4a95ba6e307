// Which rows of which head a block works on, and the key tiles that they see.
#pragma once

#include "sm90/config.cuh"

namespace cuflash {

// Found by the producer, read by the consumers from shared memory: 64 bytes.
struct Work {
    int entry, head, first_row;  // entry < 0: there is no more
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // key tiles that some row of the cluster sees
    int clean_begin, clean_end;  // of those, the ones that all rows of the block see whole
    int unused[6];

    __device__ __forceinline__ static int used(const i64* lens, int entry, int capacity) {
        if (!Config::LENGTHS || lens == nullptr) return capacity;
        const i64 length = lens[entry];  // not checked on the host when it lives on the device
        return length < 0 ? 0 : length > capacity ? capacity : int(length);
    }

    __device__ __forceinline__ void find(int ticket, int rank, const Arguments& a) {
        int row_tile, head_of_all;
        if (Config::BOUNDED) {  // longest rows first, among heads whose K and V stay in the cache
            const int of_section = a.section * a.row_tiles, section = ticket / of_section;
            const int in_section = ticket - section * of_section;
            const int heads = min(a.section, a.batch_heads - section * a.section);
            const int turn = in_section / heads;
            row_tile = a.row_tiles - 1 - turn;
            head_of_all = section * a.section + in_section - turn * heads;
        } else {  // blocks at work share a head
            head_of_all = ticket / a.row_tiles;
            row_tile = ticket - head_of_all * a.row_tiles;
        }
        entry = head_of_all / a.q_heads, head = head_of_all - entry * a.q_heads;
        q_len = used(a.q_lens, entry, a.q_len);
        kv_len = used(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;

        const int first = row_tile * Config::CLUSTER * Config::M;  // of the cluster
        first_row = first + rank * Config::M;
        begin = clean_begin = 0;
        end = (kv_len + Config::BN - 1) / Config::BN;
        clean_end = kv_len / Config::BN;
        if (Config::BOUNDED) {
            const int last = min(first + Config::CLUSTER * Config::M, q_len) - 1;
            if (Config::LEFT) begin = max(0, first + diagonal - a.left) / Config::BN;
            end = min(end, (max(0, last + diagonal + a.right + 1) + Config::BN - 1) / Config::BN);
            if (Config::LEFT)
                clean_begin = (max(0, first_row + Config::M - 1 + diagonal - a.left) + Config::BN - 1) / Config::BN;
            clean_end = min(clean_end, max(0, first_row + diagonal + a.right + 1) / Config::BN);
        }
        if (first >= q_len || end < begin) end = begin;
    }

    __device__ __forceinline__ void put(u32 shared) const {
        const u32 words[12] = {u32(entry), u32(head),     u32(first_row), u32(q_len),       u32(kv_len),    u32(diagonal),
                               u32(begin), u32(end),      u32(clean_begin), u32(clean_end), 0,              0};
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const u32 unit[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
            store_unit(shared + 16 * i, unit);
        }
    }

    __device__ __forceinline__ void get(u32 shared) {
        u32 a[4], b[4], c[4];
        load_unit(a, shared), load_unit(b, shared + 16), load_unit(c, shared + 32);
        entry = a[0], head = a[1], first_row = a[2], q_len = a[3];
        kv_len = b[0], diagonal = b[1], begin = b[2], end = b[3];
        clean_begin = c[0], clean_end = c[1];
    }
};
static_assert(sizeof(Work) == 64, "one record of the ring");

}  // namespace cuflash
