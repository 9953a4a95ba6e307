// Which keys of which head a block works on, and the tiles of queries that see them.
#pragma once

#include "sm90_backward/config.cuh"

namespace cuflash {

// Found by the producer, read by all others from shared memory: 64 bytes.
struct Work {
    int entry, kv_head, tile;  // tile: of keys; entry < 0: there is no more
    int q_len, kv_len;         // of the entry
    int diagonal;              // the key that row 0 is aligned with
    int begin, end;            // tiles of queries of which some row sees some of the keys
    int clean_begin, clean_end;  // those of which every row sees all of them
    int sweep_first, sweep_last;  // tiles of keys of a sweep whose order is reversed; sweep_last < 0: it is not
    int section, in_section;      // of kv heads, and which of its pieces of work it is
    int split, part;  // of which split piece it is which part; split < 0: it is whole

    __device__ __forceinline__ void find(u32 ticket, const Arguments& a) {
        split = -1, part = 0;
        if (ticket >= a.whole) {
            split = (ticket - a.whole) / a.parts, part = ticket - a.whole - split * a.parts;
            ticket = a.whole + split;
        }
        const u32 of_section = a.section * a.key_tiles;
        section = ticket / of_section, in_section = ticket - section * of_section;
        u32 head;
        // Under a causal mask most rows see the first keys. Where tiles of keys add to dQ in turn, they had better begin one
        // after the other, too.
        if (Config::BOUNDED || Config::ORDERED) {
            const u32 heads = min(a.section, a.all_kv_heads - section * a.section);
            const u32 place = u32(in_section) / heads;
            head = in_section - place * heads;
            find_tile(place, a);
        } else {  // blocks at work share a head
            head = u32(in_section) / a.key_tiles;
            tile = in_section - head * a.key_tiles;
        }
        head += section * a.section;
        entry = head / a.kv_heads, kv_head = head - entry * a.kv_heads;
        q_len = used_length(a.q_lens, entry, a.q_len);
        kv_len = used_length(a.kv_lens, entry, a.kv_len);
        diagonal = a.top_left ? 0 : kv_len - q_len;
        find_queries(a);
        if (split < 0) return;
        const i64 count = end - begin;
        end = begin + int(count * (part + 1) / a.parts), begin += int(count * part / a.parts);
        clean_begin = min(max(clean_begin, begin), end), clean_end = min(max(clean_end, begin), end);
    }

    __device__ __forceinline__ void find_queries(const Arguments& a) {
        const int first = tile * Config::BN, last = min(first + Config::BN, kv_len) - 1;  // keys
        begin = 0, end = (q_len + Config::BM - 1) / Config::BM;
        clean_begin = 0, clean_end = end;
        if (Config::BOUNDED) {
            // Row i sees key j where i + diagonal - left <= j <= i + diagonal + right.
            begin = max(0, first - diagonal - a.right) / Config::BM;
            clean_begin = (max(0, last - diagonal - a.right) + Config::BM - 1) / Config::BM;
            if (Config::LEFT) {
                end = min(end, (max(0, last - diagonal + a.left + 1) + Config::BM - 1) / Config::BM);
                clean_end = max(0, first - diagonal + a.left + 1) / Config::BM;
            }
        }
        if (last < first || end < begin) end = begin;
        if (last < first + Config::BN - 1) clean_begin = end;  // keys past the last one are hidden from all
        clean_begin = min(max(clean_begin, begin), end);
        clean_end = min(max(clean_end, clean_begin), end);  // but for a left bound, the last tile is clean or none
    }

    __device__ __forceinline__ bool is_clean(int of_queries) const { return of_queries >= clean_begin && of_queries < clean_end; }

    // Where the work of tiles shrinks from one to the next, and each has to add to dQ after the one before, blocks that
    // began one after the other end close together, and so begin the next tiles closer than turns take. So the order is
    // reversed in every other sweep, the first among them: distances grow there by as much as they shrink in the next.
    static constexpr bool SWEEPS = Config::ORDERED && Config::BOUNDED && !Config::LEFT;
    __device__ __forceinline__ void find_tile(u32 place, const Arguments& a) {
        tile = place, sweep_first = 0, sweep_last = -1;
        if (!SWEEPS) return;
        const u32 sweep = place / a.sweep;
        if (sweep % 2 == 1) return;
        sweep_first = sweep * a.sweep, sweep_last = min(sweep_first + a.sweep, a.key_tiles) - 1;
        tile = sweep_first + sweep_last - place;
    }

    // Tiles of keys that add to a tile of queries before this one, which sees it.
    __device__ __forceinline__ int turn(int q_tile, const Arguments& a) const {
        if (Config::LEFT) return tile - max(0, q_tile * Config::BM + diagonal - a.left) / Config::BN;
        if (!SWEEPS || sweep_last < 0) return tile;
        const int last_key = kv_len - 1 - max(0, kv_len - (q_tile + 1) * Config::BM - diagonal - a.right);
        return sweep_first + min(sweep_last, last_key / Config::BN) - tile;
    }

    // The tile of one of the heads that share the keys, of all tiles.
    __device__ __forceinline__ i64 place_of(int of_group, int q_tile, const Arguments& a) const {
        return (i64(entry) * a.q_heads + kv_head * a.group + of_group) * a.q_tiles + q_tile;
    }

    __device__ __forceinline__ void put(u32 shared) const {
        const u32 first[4] = {u32(entry), u32(kv_head), u32(tile), u32(q_len)};
        const u32 second[4] = {u32(kv_len), u32(diagonal), u32(begin), u32(end)};
        const u32 third[4] = {u32(clean_begin), u32(clean_end), u32(sweep_first), u32(sweep_last)};
        const u32 fourth[4] = {u32(section), u32(in_section), u32(split), u32(part)};
        store_unit(shared, first), store_unit(shared + 16, second), store_unit(shared + 32, third);
        store_unit(shared + 48, fourth);
    }

    __device__ __forceinline__ void get(u32 shared) {
        u32 first[4], second[4], third[4], fourth[4];
        load_unit(first, shared), load_unit(second, shared + 16), load_unit(third, shared + 32);
        load_unit(fourth, shared + 48);
        entry = first[0], kv_head = first[1], tile = first[2], q_len = first[3];
        kv_len = second[0], diagonal = second[1], begin = second[2], end = second[3];
        clean_begin = third[0], clean_end = third[1], sweep_first = third[2], sweep_last = third[3];
        section = fourth[0], in_section = fourth[1], split = fourth[2], part = fourth[3];
    }

    // That a warp has one of each field spares registers.
    __device__ __forceinline__ void make_uniform() {
        for (int* field : {&entry, &kv_head, &tile, &q_len, &kv_len, &diagonal, &begin, &end, &clean_begin, &clean_end, &split})
            *field = __shfl_sync(~0u, *field, 0);
    }
};
static_assert(sizeof(Work) == 64, "one record of the ring");

// A reader of the ring of records: a thread by itself, or with its whole WARP.
template <bool WARP>
struct Works {
    Place<2> place{0};

    // Whether there is more.
    __device__ __forceinline__ bool next(Work& work, u32 base) const {
        barrier_wait(base + Shared::work_full + 8 * place.slot, place.parity);
        read(work, base);
        return work.entry >= 0;
    }
    // Once more, until it is released: it need not be kept in registers.
    __device__ __forceinline__ void read(Work& work, u32 base) const {
        work.get(base + Shared::works + 64 * place.slot);
        if (WARP) work.make_uniform();
    }
    __device__ __forceinline__ void release(u32 base) {
        barrier_arrive(base + Shared::work_empty + 8 * place.slot);
        place.next();
    }
};

}  // namespace cuflash
