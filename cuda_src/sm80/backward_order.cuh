// In which order tiles of keys add to dQ, where it is the same run after run.
//
// Each waits for those before it, which have to be at work already: a block draws a ticket as it starts, since CUDA does not
// promise that blocks start in the order of blockIdx. Tickets go through sections of heads, one after another; in a section
// through tiles of keys, and for each of them through the heads, so that blocks of a head start apart.
//
// Keys fall: from the last tile to the first, and a block goes through its queries from the first to the last. Under a
// causal mask or in a window a block begins where those before it are already past, and finds each turn come. Where all
// begin at the same queries, the first blocks wait for one another once, and those after them start as far apart as those
// end.
//
// Keys rise in the last section, and queries fall: blocks with the most work come first, so that all end at about the
// same time.
#pragma once

#include "sm80/backward_config.cuh"

namespace cuflash {

// Keys and queries are numbers of tiles.
struct KeyOrder {
    int head_of_all, keys;
    bool rises;  // the order of keys

    __device__ __forceinline__ KeyOrder(u32 ticket, const Arguments& a) {
        // From the end, so that the last section is whole.
        const u32 place = u32(a.all_kv_heads) * a.key_blocks - 1 - ticket;
        const u32 of_section = u32(a.section) * a.key_blocks, section = place / of_section;
        const u32 heads = min(u32(a.section), u32(a.all_kv_heads) - section * a.section);
        const u32 in_section = place - section * of_section, row = in_section / heads;
        head_of_all = a.all_kv_heads - 1 - (section * a.section + in_section - row * heads);
        rises = section == 0;
        keys = rises ? a.key_blocks - 1 - row : row;
    }
};

// How many tiles of keys add to a tile of queries before one of those that see it; as KeyWork::find_tiles has it.
__device__ __forceinline__ int turn_of(bool rises, int keys, int queries, int kv_len, int diagonal, int left, int right) {
    if (rises) return Config::BOUNDED ? keys - max(0, queries * Config::M + diagonal - left) / Config::BN : keys;
    const int last_key = kv_len - 1;
    if (!Config::BOUNDED) return last_key / Config::BN - keys;
    return min(last_key, (queries + 1) * Config::M - 1 + diagonal + right) / Config::BN - keys;
}

}  // namespace cuflash
