// One thread that fetches: work, then Q, K and V by tensor copies, as fast as places come free.
#pragma once

#include "sm90/work.cuh"

namespace cuflash {

__device__ __forceinline__ void produce(u32 base, int rank, const Arguments& a) {
    // Rows of a tile of K and V that this block fetches for the cluster.
    constexpr int PART = Config::BN / Config::CLUSTER, V_PART = Config::V_ROWS / Config::CLUSTER;
    Place<Config::STAGES> k_place(1), v_place(1);
    Place<2> work_place(1);
    u32 q_parity = 1;
    Work work;
    int kv_head = 0;

    auto hand_over = [&] {
        barrier_wait(base + Shared::work_empty + 8 * work_place.slot, work_place.parity);
        work.put(base + Shared::works + 64 * work_place.slot);
        barrier_arrive(base + Shared::work_full + 8 * work_place.slot);
        work_place.next();
    };
    auto load = [&](u32 to, const TensorMap& map, u32 full, int column, int head, int row) {
        if (Config::CLUSTER == 2)
            load_box_for_pair(to, map, full, column, head, row, work.entry);
        else
            load_box(to, map, full, column, head, row, work.entry);
    };
    auto load_keys = [&](int tile) {
        const u32 full = base + Shared::k_full + 8 * k_place.slot;
        const u32 to = base + Shared::k + k_place.slot * Shared::K_STAGE + rank * PART * Config::QK_ROW;
        barrier_wait(base + Shared::k_empty + 8 * k_place.slot, k_place.parity);
        barrier_expect(full, Shared::K_STAGE);
#pragma unroll
        for (int panel = 0; panel < Config::D / Config::QK_PANEL; ++panel)
            load(to + panel * Config::BN * Config::QK_ROW, a.k, full, panel * Config::QK_PANEL, kv_head,
                 tile * Config::BN + rank * PART);
        k_place.next();
    };
    u32 gone_parity = 0;
    auto await_out_gone = [&](int group) {
        if (Config::OUT_IN_PLACE) barrier_wait(base + Shared::out_gone + 8 * group, gone_parity);
    };
    auto load_values = [&](int tile) {
        // Out of the work before lies in the places of its last two tiles, that of the first warpgroup in the next to be
        // filled. If just one is now, the other has to be free all the same when out follows.
        if (tile == work.end - 1) await_out_gone(0);
        if (tile == max(work.end - 2, work.begin)) await_out_gone(1);
        const u32 full = base + Shared::v_full + 8 * v_place.slot;
        const u32 to = base + Shared::v + v_place.slot * Shared::V_STAGE + rank * V_PART * Config::V_ROW;
        barrier_wait(base + Shared::v_empty + 8 * v_place.slot, v_place.parity);
        barrier_expect(full, Shared::V_STAGE);
#pragma unroll
        for (int panel = 0; panel < Config::V_COLUMNS / Config::V_PANEL; ++panel)
            load(to + panel * Config::V_ROWS * Config::V_ROW, a.v, full,
                 panel * Config::V_PANEL + (Config::EIGHT ? tile * Config::BN : 0), kv_head,
                 rank * V_PART + (Config::EIGHT ? 0 : tile * Config::BN));
        v_place.next();
    };

    u32 first_parity = 1;
    auto load_first_values = [&] {
        const u32 full = base + Shared::first_full;
        barrier_wait(base + Shared::first_empty, first_parity);
        barrier_expect(full, Config::DV / 64 * Shared::FIRST_PANEL);
#pragma unroll
        for (int panel = 0; panel < Config::DV / 64; ++panel)
            load_box(base + Shared::first + panel * Shared::FIRST_PANEL, a.first, full, panel * 64, kv_head, 0, work.entry);
        first_parity ^= 1;
    };

    int ticket = blockIdx.x / Config::CLUSTER;
    while (ticket < a.tickets) {
        work.find(ticket, rank, a);
        kv_head = work.head / a.group;
        if (Config::EIGHT) work.kv_row = work.entry * (a.q_heads / a.group) + kv_head;
        hand_over();
        const bool any = work.begin < work.end;
        if (Config::FIRST && any && work.end <= 2) load_first_values();
        if (any) load_keys(work.end - 1);
#pragma unroll
        for (int group = 0; group < Config::GROUPS; ++group) {
            const u32 full = base + Shared::q_full + 8 * group;
            barrier_wait(base + Shared::q_empty + 8 * group, q_parity);
            if (!any) {  // its place alone: a phase for each piece of work
                barrier_arrive(full);
                continue;
            }
            barrier_expect(full, Config::D * Config::ITEM * a.rows * a.pack);
#pragma unroll
            for (int panel = 0; panel < Config::D / Config::QK_PANEL; ++panel)
                load_box(base + Shared::q + group * Shared::Q_GROUP + panel * 64 * Config::QK_ROW, a.q, full,
                         panel * Config::QK_PANEL, work.head, work.first_row + group * a.rows, work.entry);
        }
        q_parity ^= 1;
#pragma unroll 1
        for (int tile = work.end - 2; tile >= work.begin; --tile) {
            if (Config::FIRST && tile == 1) load_first_values();
            load_keys(tile);
            load_values(tile + 1);
        }
        // As many draws as tickets, after which the counter is 0 again. Asked for early: nothing waits for it here.
        const u32 drawn = Config::DYNAMIC ? atomicInc(a.counter, a.tickets - 1) : 0;
        if (any)
            load_values(work.begin);
        else
            await_out_gone(0), await_out_gone(1);
        gone_parity ^= 1;
        ticket = (Config::DYNAMIC ? int(drawn) : ticket) + gridDim.x / Config::CLUSTER;
    }
    work.entry = -1;
    hand_over();
}

}  // namespace cuflash
