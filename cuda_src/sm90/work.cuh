// Which rows of which heads a block works on, and the key tiles that they see.
#pragma once

#include "sm90/config.cuh"

namespace cuflash {

// Found by the producer, read by the consumers from shared memory: 64 bytes.
struct Work {
    int entry, head, first_row;  // head: the first of a pack; entry < 0: there is no more
    int q_len, kv_len;           // of the entry
    int diagonal;                // the key that row 0 is aligned with
    int begin, end;              // key tiles that some row of the cluster sees
    int kv_row;                  // of (entries, kv heads), for 8 bits
    int unused[7];

    __device__ __forceinline__ static int used(const i64* lens, int entry, int capacity) {
        if (!Config::LENGTHS || lens == nullptr) return capacity;
        const i64 length = lens[entry];  // not checked on the host when it lives on the device
        return length < 0 ? 0 : length > capacity ? capacity : int(length);
    }

    __device__ __forceinline__ void find(int ticket, int rank, const Arguments& a) {
        int row_tile, pack_of_all;
        if (Config::BOUNDED) {  // longest rows first, among packs whose K and V stay in the cache
            const int of_section = a.section * a.row_tiles, section = ticket / of_section;
            const int in_section = ticket - section * of_section;
            const int packs = min(a.section, a.all_packs - section * a.section);
            const int turn = in_section / packs;
            row_tile = a.row_tiles - 1 - turn;
            pack_of_all = section * a.section + in_section - turn * packs;
        } else {  // blocks at work share a pack
            pack_of_all = ticket / a.row_tiles;
            row_tile = ticket - pack_of_all * a.row_tiles;
        }
        entry = pack_of_all / a.packs, head = (pack_of_all - entry * a.packs) * a.pack;
        q_len = used(a.q_lens, entry, a.q_len);
        kv_len = used(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;

        const int rows = Config::GROUPS * a.rows;  // of a block
        const int first = row_tile * Config::CLUSTER * rows;  // of the cluster
        first_row = first + rank * rows;
        begin = 0, end = (kv_len + Config::BN - 1) / Config::BN;
        if (Config::BOUNDED) {
            const int last = min(first + Config::CLUSTER * rows, q_len) - 1;
            if (Config::LEFT) begin = first_tile(first, a);
            end = min(end, tiles_to(last, a));
        }
        if (first >= q_len || end < begin) end = begin;
    }

    // The tile of the first key that a row sees, and the tiles up to its last one.
    __device__ __forceinline__ int first_tile(int row, const Arguments& a) const {
        return max(0, row + diagonal - a.left) / Config::BN;
    }
    __device__ __forceinline__ int tiles_to(int row, const Arguments& a) const {
        return (max(0, row + diagonal + a.right + 1) + Config::BN - 1) / Config::BN;
    }

    __device__ __forceinline__ void put(u32 shared) const {
        const u32 rows[4] = {u32(entry), u32(head), u32(first_row), u32(q_len)};
        const u32 keys[4] = {u32(kv_len), u32(diagonal), u32(begin), u32(end)};
        store_unit(shared, rows), store_unit(shared + 16, keys);
        if (!Config::EIGHT) return;
        const u32 more[4] = {u32(kv_row), 0, 0, 0};
        store_unit(shared + 32, more);
    }

    __device__ __forceinline__ void get(u32 shared) {
        u32 rows[4], keys[4];
        load_unit(rows, shared), load_unit(keys, shared + 16);
        entry = rows[0], head = rows[1], first_row = rows[2], q_len = rows[3];
        kv_len = keys[0], diagonal = keys[1], begin = keys[2], end = keys[3];
        if (!Config::EIGHT) return;
        load_unit(rows, shared + 32);
        kv_row = rows[0];
        // That a warp has one of each spares registers, which 8 bits lack.
        for (int* field : {&entry, &head, &first_row, &q_len, &kv_len, &diagonal, &begin, &end, &kv_row})
            *field = __shfl_sync(~0u, *field, 0);
    }
};
static_assert(sizeof(Work) == 64, "one record of the ring");

// The key tiles that the rows of one warpgroup see, one at least, and which of those all of them see whole.
struct Span {
    int begin, end, clean_begin, clean_end;

    __device__ __forceinline__ Span(const Work& work, int group, const Arguments& a) {
        begin = work.begin, end = work.end, clean_begin = 0, clean_end = work.kv_len / Config::BN;
        if (!Config::BOUNDED) return;
        const int first = work.first_row + group * a.rows, beyond = first + a.rows;
        const int last = min(beyond, work.q_len) - 1;
        if (Config::SKIPS) end = last < first ? begin + 1 : max(begin + 1, min(end, work.tiles_to(last, a)));
        clean_end = min(clean_end, max(0, first + work.diagonal + a.right + 1) / Config::BN);
        if (Config::LEFT) {
            if (Config::SKIPS) begin = min(max(begin, work.first_tile(first, a)), end - 1);
            clean_begin = (max(0, beyond - 1 + work.diagonal - a.left) + Config::BN - 1) / Config::BN;
        }
    }
};

}  // namespace cuflash
