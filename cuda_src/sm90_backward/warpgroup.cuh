// What warpgroups that multiply do from work to work; how they walk the tiles of queries is in walk.cuh and walk_parted.cuh.
#pragma once

#include "sm90_backward/scores.cuh"

namespace cuflash {

// ONE: one for each warpgroup. FULL, EMPTY: one for each tile of dS and warpgroup. 0 is __syncthreads.
enum NamedBarrier { ALL = 1, ONE, FULL = ONE + 2, EMPTY = FULL + 4 };

struct True {
    static constexpr bool value = true;
};
struct False {
    static constexpr bool value = false;
};

struct Warpgroup {
    static constexpr int THREADS = 128 * Config::GROUPS;

    const Arguments& a;
    u32 base;
    int group;
    Place<Config::Q_STAGES> q_place{0};
    Place<Config::O_STAGES> own_o_place{0};  // where dO has another number of stages
    u32 handed_over = 0;  // chunks of shares of dQ
    Works<true> works;
    u32 kv_parity = 0, all_parity = 0;
    u32 own_unit;  // of 16 bytes for each thread of the warpgroup: where its own are
    bool unannounced = false;  // whether a share of dQ is written but not fenced

    __device__ __forceinline__ Warpgroup(const Arguments& arguments, u32 shared, int of_group)
        : a(arguments), base(shared), group(of_group), own_unit(threadIdx.x % 128 * 16) {
        // Else the compiler reads the thread's index again in each step, which waits for stores to shared memory that are
        // under way, at the start of a step those of dQ. In turn, tiles of 128 queries lack the register.
        if (Config::BM == 64 || !Config::ORDERED) asm volatile("" : "+r"(own_unit));
    }

    __device__ __forceinline__ static bool is_leader() { return threadIdx.x % 128 == 0; }
    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static int warp() { return threadIdx.x / 32 % 4; }
    // The first of this warpgroup's lines in a tile of keys.
    __device__ __forceinline__ int first_line() const { return Config::PARTED ? 0 : 64 * group; }
    __device__ __forceinline__ int line() const { return first_line() + 16 * warp() + lane() / 4; }
    // This warp's products have read what is there.
    __device__ __forceinline__ static void release(u32 empty) {
        __syncwarp();
        if (lane() == 0) barrier_arrive(empty);
    }
    // All threads that multiply. Where warpgroups have code of their own, compute-sanitizer wants no named barrier of both.
    __device__ __forceinline__ void meet_all() {
        if (Config::PARTED) {
            barrier_arrive(base + Shared::all);
            barrier_wait(base + Shared::all, all_parity);
            all_parity ^= 1;
        } else {
            __syncwarp();
            meet(ALL, THREADS);
        }
    }

    // With as many stages of both, the places are the same.
    template <int STAGES>
    __device__ __forceinline__ static const Place<STAGES>& place_of(const Place<STAGES>& q, const Place<STAGES>&) {
        return q;
    }
    template <int Q_STAGES, int O_STAGES>
    __device__ __forceinline__ static const Place<O_STAGES>& place_of(const Place<Q_STAGES>&, const Place<O_STAGES>& own) {
        return own;
    }
    __device__ __forceinline__ const Place<Config::O_STAGES>& o_place() const { return place_of(q_place, own_o_place); }
    __device__ __forceinline__ void next_tile() {
        q_place.next();
        if (Config::Q_STAGES != Config::O_STAGES) own_o_place.next();
    }
    __device__ __forceinline__ u32 o_empty() const { return base + Shared::o_empty + 8 * o_place().slot; }
    __device__ __forceinline__ u32 q_empty() const { return base + Shared::q_empty + 8 * q_place.slot; }
    __device__ __forceinline__ u32 q_full() const { return base + Shared::q_full + 8 * q_place.slot; }
    __device__ __forceinline__ u32 o_full() const { return base + Shared::o_full + 8 * o_place().slot; }
    __device__ __forceinline__ u32 q_tile() const { return base + Shared::q + q_place.slot * Shared::Q; }
    __device__ __forceinline__ u32 o_tile() const { return base + Shared::o + o_place().slot * Shared::O; }
    __device__ __forceinline__ u32 lse() const { return stats(Shared::lse); }
    __device__ __forceinline__ u32 delta() const { return stats(Shared::delta); }
    __device__ __forceinline__ u32 stats(u32 first) const { return base + first + q_place.slot * Shared::STATS + own_unit % 64; }
    __device__ __forceinline__ u32 k_lines() const { return low_word(base + Shared::k + first_line() * Config::ROW, 16); }
    __device__ __forceinline__ u32 v_lines() const { return low_word(base + Shared::v + first_line() * Config::ROW, 16); }
    // Of operands that lie transposed: panels follow each other.
    __device__ __forceinline__ u32 q_columns() const { return low_word(q_tile(), Config::BM * Config::ROW); }
    __device__ __forceinline__ u32 o_columns() const { return low_word(o_tile(), Config::BM * Config::ROW); }
    __device__ __forceinline__ u32 k_columns(int chunk = 0) const {
        const int column = (Config::SHARE == COLUMNS ? group * Config::DQ_SHARE : 0) + chunk * Config::DQ_COLUMNS;
        return low_word(base + Shared::k + column / Config::PANEL * Config::BN * Config::ROW, Config::BN * Config::ROW);
    }
    __device__ __forceinline__ u32 scores(int slot) const { return base + Shared::scores + slot * Shared::SCORES; }
    __device__ __forceinline__ u32 scores_words(int slot) const {
        return low_word(scores(slot) + (Config::SHARE == LINES ? group * 64 * 128 : 0), 16);
    }

    // Weights or dS of this warpgroup, to where rows are queries: panels of 64 keys.
    __device__ __forceinline__ void store_transposed(u32 to, const Weights& weights) const {
        const int thread = own_unit / 16, lane = thread % 32;
        const int row = lane % 8 + lane / 16 * 8, column = thread / 32 * 2 + lane / 8 % 2;
        const u32 at = to + (Config::PARTED ? 0 : group * Config::BM * 128) + row * 128 + 16 * (column ^ (row % 8));
#pragma unroll
        for (int step = 0; step < Config::BM / 16; ++step) {
            const u32 matrices[4] = {weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3]};
            store_matrices_transposed(at + step * 16 * 128, matrices);
        }
    }

    // Of places one for each warpgroup, this one's: worked out at each use, since registers lack.
    __device__ __forceinline__ u32 own(u32 first, u32 size) const {
        u32 index = group;
        work_out_here(index);
        return base + first + index * size;
    }

    // The share of dQ of the tile before is fenced together with dS of this one: a fence waits for all that is under way. In
    // turn, it has a fence of its own where warpgroups share keys: other blocks wait for it, and turns are what takes
    // longest there.
    __device__ __forceinline__ void announce_dq() {
        __syncwarp();
        // Not one branch around both, across which the compiler would not keep products apart from packing.
        const u32 adder = Config::ORDERED ? handed_over / Config::DQ_CHUNKS % 2 : 0;
        if (unannounced && lane() == 0) barrier_arrive(own(Shared::dq_full, 16) + 8 * adder);
        if (unannounced) ++handed_over;
        unannounced = false;
    }
    __device__ __forceinline__ void hand_over_dq(const QuerySums& sums) {
        barrier_wait(own(Shared::dq_empty, 8), handed_over % 2 ^ 1);
        const u32 at = own(Shared::dq, Shared::DQ) + own_unit;
#pragma unroll
        for (int i = 0; i < Config::DQ_COLUMNS / 2; i += 4)
            store_floats(at + i * 512, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        unannounced = true;
        if (Config::ORDERED && Config::PARTED) fence_async(), announce_dq();
    }

    // Rows of a tile from one on become 0, by the threads of some warpgroups: a weight of 0 times what memory holds there
    // might be NaN.
    template <int WIDTH, int ROWS>
    __device__ __forceinline__ static void clear_rows(u32 tile, int from, int to, int threads) {
        constexpr int UNITS = Config::ROW / 16;
        const u32 zeros[4] = {0, 0, 0, 0};
        const int all = (to - from) * UNITS * (WIDTH / Config::PANEL);
        for (int i = threadIdx.x % threads; i < all; i += threads) {
            const int unit = i % UNITS, row = from + i / UNITS % (to - from), panel = i / UNITS / (to - from);
            store_unit(tile + (panel * ROWS + row) * Config::ROW + 16 * unit, zeros);
        }
    }
    __device__ __forceinline__ void clear_dead_keys(const Work& work) {
        const int from = work.kv_len - work.tile * Config::BN;
        if (!Config::LENGTHS || from >= Config::BN) return;
        clear_rows<Config::D, Config::BN>(base + Shared::k, from, Config::BN, THREADS);
        clear_rows<Config::DV, Config::BN>(base + Shared::v, from, Config::BN, THREADS);
        fence_async();
        meet_all();
    }
    // Of the last tile of a head, which comes first.
    __device__ __forceinline__ void clear_dead_queries(const Work& work) {
        const int from = work.q_len - (work.end - 1) * Config::BM;
        if (!Config::LENGTHS || from >= Config::BM) return;
        barrier_wait(q_full(), q_place.parity), barrier_wait(o_full(), o_place().parity);
        clear_rows<Config::D, Config::BM>(q_tile(), from, Config::BM, THREADS);
        clear_rows<Config::DV, Config::BM>(o_tile(), from, Config::BM, THREADS);
        fence_async();
        meet_all();
    }

    // Where sums of this warpgroup's 64 keys are before they are copied to global memory: in places that are idle between
    // two pieces of work, so that K and V of the next can be fetched meanwhile.
    template <int COUNT>
    __device__ __forceinline__ u32 staged(u32 first) const {
        static_assert(Shared::scores + Config::BN * Config::DV * 2 <= Shared::dq, "dV in the place of dS and weights");
        static_assert(Shared::dq + Config::BN * Config::D * 2 <= Shared::lse, "dK in the place of dQ");
        return base + first + (Config::PARTED ? 0 : group * 64 * 4 * COUNT);
    }
    __device__ __forceinline__ u32 staged_values() const { return staged<Config::DV / 2>(Shared::scores); }
    __device__ __forceinline__ u32 staged_keys() const { return staged<Config::D / 2>(Shared::dq); }

    // Until all that was handed over has left its place: both warpgroups hand over as often.
    __device__ __forceinline__ void await_free_dq() const {
#pragma unroll
        for (int g = 0; g < Config::GROUPS; ++g) barrier_wait(base + Shared::dq_empty + 8 * g, handed_over % 2 ^ 1);
    }

    // Sums of this warpgroup's keys to 16 bits.
    template <int COUNT>
    __device__ __forceinline__ void round(const float (&sums)[COUNT], float factor, u32 to) const {
        const int thread = own_unit / 16, lane = thread % 32, row = 16 * (thread / 32) + lane % 16;
        constexpr int STEPS = Config::PANEL / 16;
#pragma unroll
        for (int step = 0; step < COUNT / 8; ++step) {
            const float(&x)[COUNT] = sums;
            const int i = 8 * step;
            const u32 matrices[4] = {pack(x[i] * factor, x[i + 1] * factor, Config::Element()),
                                     pack(x[i + 2] * factor, x[i + 3] * factor, Config::Element()),
                                     pack(x[i + 4] * factor, x[i + 5] * factor, Config::Element()),
                                     pack(x[i + 6] * factor, x[i + 7] * factor, Config::Element())};
            const int unit = step % STEPS * 2 + lane / 16;
            const int swizzled = Config::ROW == 128 ? unit ^ (row % 8) : unit ^ (row / 2 % 4);
            store_matrices(to + (step / STEPS * 64 + row) * Config::ROW + 16 * swizzled, matrices);
        }
    }
    // By one thread.
    template <int WIDTH>
    __device__ __forceinline__ void store(const TensorMap& map, u32 from, const Work& work) const {
#pragma unroll
        for (int panel = 0; panel < WIDTH / Config::PANEL; ++panel)
            store_box(map, from + panel * 64 * Config::ROW, panel * Config::PANEL, work.kv_head,
                      work.tile * Config::BN + first_line(), work.entry);
    }

    template <int COUNT>
    __device__ __forceinline__ static void clear(float (&sums)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] = 0.f;
    }

    // And until the sums of the work before have left the places where they were staged.
    __device__ __forceinline__ void await_keys_and_values() {
        barrier_wait(base + Shared::k_full, kv_parity);
        barrier_wait(base + Shared::v_full, kv_parity);
        kv_parity ^= 1;
        if (is_leader()) wait_stores_read();
        meet_all();
    }
    // After the last product of a piece of work: K and V are every warpgroup's, and dS is.
    __device__ __forceinline__ void leave_keys_and_values() {
        fence_async();
        announce_dq();
        meet_all();
        release(base + Shared::kv_empty);
        await_free_dq();
    }

    // Sums of all parts of a split piece of work, added in their order: they have the same bits whichever ends last. The
    // warpgroup whose part does has them then, and true.
    template <int... COUNTS>
    __device__ __forceinline__ bool join_parts(const Work& work, float (&... sums)[COUNTS]) const {
        constexpr int WIDER = Config::D > Config::DV ? Config::D : Config::DV;
        constexpr int UNITS = 128 * (Config::PARTED ? WIDER : Config::D + Config::DV) / 8;  // of 16 bytes
        const i64 first = (i64(work.split) * a.parts * Config::GROUPS + group) * UNITS;
        float4* const of_thread = reinterpret_cast<float4*>(a.partials) + first + own_unit / 16;
        float4* at = of_thread + work.part * (Config::GROUPS * UNITS);
        (put_sums(at, sums), ...);
        __threadfence();
        meet(ONE + group, 128);
        const u32 shared = base + Shared::last + 16 * group;
        if (is_leader()) {
            const u32 before = atomicAdd(first_split(a) + work.split * Config::GROUPS + group, 1);
            __threadfence();
            const u32 is_last[4] = {before == a.parts - 1};
            store_unit(shared, is_last);
        }
        meet(ONE + group, 128);
        u32 is_last[4];
        load_unit(is_last, shared);
        if (is_last[0] == 0) return false;
        (clear(sums), ...);
#pragma unroll 1
        for (u32 part = 0; part < a.parts; ++part) {
            const float4* from = of_thread + part * (Config::GROUPS * UNITS);
            (add_sums(sums, from), ...);
        }
        return true;
    }
    // Threads of a warpgroup have 16 bytes each; another array follows.
    template <int COUNT>
    __device__ __forceinline__ static void put_sums(float4*& to, const float (&sums)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4, to += 128) __stcg(to, make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]));
    }
    template <int COUNT>
    __device__ __forceinline__ static void add_sums(float (&sums)[COUNT], const float4*& from) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4, from += 128) {
            const float4 more = __ldcg(from);
            sums[i] += more.x, sums[i + 1] += more.y, sums[i + 2] += more.z, sums[i + 3] += more.w;
        }
    }

    // `step(hidden, sight, tile)` for each tile of queries of each head; `hidden` says in its type whether some pair is.
    // `begin(of_group, tile)` comes before each head's, and may take the first. Work is read again where it is needed, so
    // that it takes no registers in the loops over tiles of 128 queries.
    template <typename Begin, typename Step>
    __device__ __forceinline__ void walk(Work& work, Begin begin, Step step) {
        auto read_again = [&] {
            if (Config::BM == 128) works.read(work, base);
        };
#pragma unroll 1
        for (int of_group = 0; of_group < a.group; ++of_group) {
            read_again();
            clear_dead_queries(work);
            int tile = work.end - 1;
            begin(of_group, tile);
            if (Config::LEFT) {
#pragma unroll 1
                while (true) {
                    read_again();
                    if (tile < work.begin) break;
                    if (work.is_clean(tile))
                        walk_clean(tile, work.clean_begin, step);
                    else
                        walk_hidden(tile, tile >= work.clean_end ? work.clean_end : work.begin, work, step);
                }
            } else {
                read_again();
                walk_clean(tile, work.clean_begin, step);
                read_again();
                walk_hidden(tile, work.begin, work, step);
            }
        }
    }
    template <typename Step>
    __device__ __forceinline__ static void walk_clean(int& tile, int until, Step step) {
        const Sight all = {};
#pragma unroll 1
        for (; tile >= until; --tile) step(False(), all, tile);
    }
    template <typename Step>
    __device__ __forceinline__ void walk_hidden(int& tile, int until, const Work& work, Step step) const {
        const Sight sight(work, line(), a);
#pragma unroll 1
        for (; tile >= until; --tile) step(True(), sight, tile);
    }
};

}  // namespace cuflash
