// Stands for the header of that name, for a C++ compiler of the host: what its wrappers do, and the parts of CUDA C++ that
// the kernels use. Each thread of a block is a coroutine; the warp's instructions wait for all 32 lanes, with the layouts of
// the PTX ISA. Warps take turns at random, and asynchronous copies come as late as they may, or of half the threads at any
// time before, so that a missing barrier shows.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { unsigned x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::max;
using std::min;

namespace emulated {

struct Flight {  // copies of a thread that have not come, and who is to be told
    std::vector<std::function<void()>> copies;
    std::uint32_t barrier;
};

struct Thread {
    ucontext_t start;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    int index, started, done, hasty;  // its copies may come before anybody waits for them
    long long additions;  // to global memory
    std::vector<std::function<void()>> copies;
    std::deque<Flight> flights;
};

struct Warp {
    int arrived = 0, kind = 0;
    unsigned long long turn = 0;
    std::uint32_t in[32][12], out[32][4];
};

struct Barrier { int expected, missing; unsigned phase; };

struct Index { int x; };

constexpr int MEMORY = 256 << 10;
alignas(1024) inline unsigned char memory[MEMORY];
inline std::vector<Thread> threads;
inline std::vector<Warp> warps;
inline std::map<std::uint32_t, Barrier> barriers;
inline Barrier all;
inline Thread* current;
inline jmp_buf scheduler;
inline Index block, grid;
inline std::set<unsigned> votes;                     // phases of `all` in which some thread says yes
inline std::map<unsigned char*, std::size_t> known;  // shared memory that is declared as a variable, and its sizes
inline std::uint32_t seed = 1;

inline unsigned random(unsigned below) {
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % below;
}

inline void fail(const char* what) {
    std::fprintf(stderr, "emulated GPU: %s\n", what);
    std::abort();
}

// Goes to another stack and back by what asks nothing of the operating system.
inline void yield() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(scheduler)) return;
    if (thread.started) _longjmp(thread.place, 1);
    thread.started = 1;
    setcontext(&thread.start);
}

inline Warp& warp() { return warps[current->index / 32]; }

// Waits for all lanes; the last one to come does the warp's work.
template <class Work>
inline void meet(int kind, const Work& work) {
    Warp& w = warp();
    if (w.arrived && w.kind != kind) fail("lanes of a warp are at different instructions");
    w.kind = kind;
    const unsigned long long turn = w.turn;
    if (++w.arrived == 32) {
        work(w);
        w.arrived = 0, ++w.turn;
    } else {
        while (w.turn == turn) yield();
    }
}

inline void arrive(Barrier& barrier) {
    if (--barrier.missing == 0) barrier.missing = barrier.expected, ++barrier.phase;
}

inline unsigned char* shared(std::uint32_t address, int bytes) {
    const std::int32_t offset = std::int32_t(address);
    if (offset % bytes) fail("an address of shared memory is not aligned");
    return memory + offset;
}

// Bytes of shared memory, of which a block knows nothing when it starts.
inline bool is_shared(void* variable, std::size_t size) {
    if (known.emplace(static_cast<unsigned char*>(variable), size).second) std::memset(variable, 0xff, size);
    return true;
}

inline void land_all(std::vector<std::function<void()>>& copies) {
    for (const auto& copy : copies) copy();
    copies.clear();
}

// Lets the oldest copies of a thread come.
inline void land(Thread& thread) {
    if (thread.flights.empty()) {
        if (thread.hasty) land_all(thread.copies);
        return;
    }
    land_all(thread.flights.front().copies);
    arrive(barriers.at(thread.flights.front().barrier));
    thread.flights.pop_front();
}

inline std::function<void()> kernel;
inline void enter() {
    kernel();
    current->done = 1;
    for (;;) yield();
}

// Runs a block to its end.
inline void run_block(int count) {
    constexpr int STACK = 128 << 10;
    std::memset(memory, 0xff, sizeof memory);  // NaN
    for (const auto& [variable, size] : known) std::memset(variable, 0xff, size);
    threads.resize(count), warps.assign(count / 32, Warp()), barriers.clear(), votes.clear();
    all = {count, count, 0};
    for (int i = 0; i < count; ++i) {
        Thread& thread = threads[i];
        thread.index = i, thread.started = thread.done = 0, thread.additions = 0, thread.hasty = random(2);
        if (!thread.stack) thread.stack.reset(new char[STACK]);
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = thread.stack.get();
        thread.start.uc_stack.ss_size = STACK;
        thread.start.uc_link = nullptr;  // `enter` does not return
        makecontext(&thread.start, enter, 0);
    }
    for (long long turns = 0;; ++turns) {
        if (turns > 50'000'000) fail("no thread gets any further");
        bool done = true;
        for (const Thread& thread : threads) done = done && thread.done;
        if (done) break;
        const int first = 32 * random(count / 32);
        for (int pass = random(400); pass >= 0; --pass) {
            const unsigned long long turn = warps[first / 32].turn;
            for (int lane = 0; lane < 32; ++lane)
                if (!threads[first + lane].done) resume(threads[first + lane]);
            if (warps[first / 32].turn == turn && random(4) == 0) break;  // it waits for others
        }
        if (random(2)) for (int i = random(count); i > 0; --i) land(threads[random(count)]);
    }
    for (const Thread& thread : threads)
        if (!thread.copies.empty() || !thread.flights.empty()) fail("copies that nobody waits for");
    for (const Warp& warp : warps)
        if (warp.arrived) fail("lanes of a warp have left others behind");
}

}  // namespace emulated

#define threadIdx (emulated::Index{emulated::current->index})
#define blockIdx (emulated::block)
#define gridDim (emulated::grid)

inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline float __fdividef(float x, float y) { return x / y; }

inline void __syncthreads() {
    const unsigned phase = emulated::all.phase;
    emulated::arrive(emulated::all);
    while (emulated::all.phase == phase) emulated::yield();
}

inline int __syncthreads_or(int is) {
    const unsigned phase = emulated::all.phase;
    if (is) emulated::votes.insert(phase);
    __syncthreads();
    return emulated::votes.count(phase);
}
inline void __syncwarp() { emulated::meet(5, [](emulated::Warp&) {}); }

inline int __shfl_xor_sync(unsigned, int x, int mask) {
    emulated::Warp& w = emulated::warp();
    const int lane = emulated::current->index % 32;
    w.in[lane][0] = unsigned(x);
    emulated::meet(1, [](emulated::Warp& w) { for (int i = 0; i < 32; ++i) w.out[i][0] = w.in[i][0]; });
    return int(w.out[lane ^ mask][0]);
}
inline float __shfl_xor_sync(unsigned all, float x, int mask) {
    return __int_as_float(__shfl_xor_sync(all, int(__float_as_uint(x)), mask));
}

namespace cuflash {

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned u32;

struct Float16 {};
struct Bfloat16 {};
struct E4m3 {};
struct Int8 {};

inline u32 shared_address(const void* pointer) {
    return u32(static_cast<const unsigned char*>(pointer) - emulated::memory);
}
inline u32 dynamic_shared() { return 0; }

inline void copy_async(u32 to, const void* from, int bytes) {
    emulated::current->copies.push_back([=] {
        if (bytes) std::memcpy(emulated::shared(to, 16), from, 16);
        else std::memset(emulated::shared(to, 16), 0, 16);
    });
    if (bytes && std::uintptr_t(from) % 16) emulated::fail("a copy's address is not aligned");
}
inline void wait_copies() { emulated::land_all(emulated::current->copies); }

inline void barrier_init(u32 barrier, int arrivals) { emulated::barriers[barrier] = {arrivals, arrivals, 0}; }
inline void barrier_arrive(u32 barrier) { emulated::arrive(emulated::barriers.at(barrier)); }
inline void barrier_arrive_with_copies(u32 barrier) {
    emulated::Thread& thread = *emulated::current;
    thread.flights.push_back({std::move(thread.copies), barrier});
    thread.copies.clear();
}
inline void barrier_wait(u32 barrier, u32 parity) {
    while ((emulated::barriers.at(barrier).phase & 1) == parity) emulated::yield();
}

inline void store_unit(u32 to, const u32 (&from)[4]) { std::memcpy(emulated::shared(to, 16), from, 16); }
inline void load_unit(u32 (&to)[4], u32 from) { std::memcpy(to, emulated::shared(from, 16), 16); }
inline void store_pair(u32 to, u32 from) { std::memcpy(emulated::shared(to, 4), &from, 4); }

// Matrix i: row r is at the address of lane 8 i + r; lane l gets elements 2 (l % 4) and the next of row l / 4.
inline void load_any(u32 (&to)[4], u32 from, bool transposed) {
    emulated::Warp& w = emulated::warp();
    const int lane = emulated::current->index % 32;
    w.in[lane][0] = from;
    emulated::meet(2 + transposed, [transposed](emulated::Warp& w) {
        for (int i = 0; i < 4; ++i) {
            u16 matrix[8][8];
            for (int r = 0; r < 8; ++r) std::memcpy(matrix[r], emulated::shared(w.in[8 * i + r][0], 16), 16);
            for (int l = 0; l < 32; ++l) {
                const int r = l / 4, c = l % 4 * 2;
                const u32 low = transposed ? matrix[c][r] : matrix[r][c];
                const u32 high = transposed ? matrix[c + 1][r] : matrix[r][c + 1];
                w.out[l][i] = low | high << 16;
            }
        }
    });
    for (int i = 0; i < 4; ++i) to[i] = w.out[lane][i];
}
inline void load_matrices(u32 (&to)[4], u32 from) { load_any(to, from, false); }
inline void load_matrices_transposed(u32 (&to)[4], u32 from) { load_any(to, from, true); }

inline float number(u16 bits, Float16) {
    const int sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24));
}
inline float number(u16 bits, Bfloat16) { return __uint_as_float(u32(bits) << 16); }

template <class Element>
inline float low_of(u32 pair, Element element) { return number(u16(pair), element); }
template <class Element>
inline float high_of(u32 pair, Element element) { return number(u16(pair >> 16), element); }

inline u32 rounded(float x, Bfloat16) {
    const u32 bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// A size of so many binary digits after the first, as bits from exponent `least` on; below it there are fewer digits.
inline u32 bits_of(float size, int digits, int least) {
    const int exponent = size < std::ldexp(1.f, least) ? least : std::ilogb(size);
    return u32(exponent - least << digits) + u32(std::nearbyint(std::ldexp(size, digits - exponent)));
}
inline u32 rounded(float x, Float16) {
    const float size = std::fabs(x);
    if (std::isnan(x)) return 0x7fff;
    return __float_as_uint(x) >> 31 << 15 | (size >= 65520.f ? 0x7c00 : bits_of(size, 10, -14));
}
template <class Element>
inline u32 pack(float low, float high, Element element) { return rounded(low, element) | rounded(high, element) << 16; }

inline u32 rounded(float x, E4m3) {
    const float size = std::fabs(x);
    if (std::isnan(x)) return 0x7f;
    return __float_as_uint(x) >> 31 << 7 | (size >= 448.f ? 0x7e : bits_of(size, 3, -6));
}
inline u32 pack(float first, float second, float third, float fourth, E4m3 element) {
    const u32 low = rounded(first, element) | rounded(second, element) << 8;
    return low | rounded(third, element) << 16 | rounded(fourth, element) << 24;
}

template <class Element>
inline void multiply(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, Element element) {
    emulated::Warp& w = emulated::warp();
    const int lane = emulated::current->index % 32;
    for (int i = 0; i < 4; ++i) w.in[lane][i] = a[i], w.in[lane][6 + i] = __float_as_uint(sums[i]);
    w.in[lane][4] = b0, w.in[lane][5] = b1;
    emulated::meet(4, [element](emulated::Warp& w) {
        float left[16][16], right[16][8], sum[16][8];
        for (int l = 0; l < 32; ++l) {
            const int g = l / 4, t = l % 4 * 2;
            for (int i = 0; i < 4; ++i) {  // rows g and g + 8, columns t and t + 8
                left[g + i % 2 * 8][t + i / 2 * 8] = low_of(w.in[l][i], element);
                left[g + i % 2 * 8][t + i / 2 * 8 + 1] = high_of(w.in[l][i], element);
                sum[g + i / 2 * 8][t + i % 2] = __uint_as_float(w.in[l][6 + i]);
            }
            for (int i = 0; i < 2; ++i) {
                right[t + i * 8][g] = low_of(w.in[l][4 + i], element);
                right[t + i * 8 + 1][g] = high_of(w.in[l][4 + i], element);
            }
        }
        for (int r = 0; r < 16; ++r)
            for (int c = 0; c < 8; ++c)
                for (int i = 0; i < 16; ++i) sum[r][c] += left[r][i] * right[i][c];
        for (int l = 0; l < 32; ++l)
            for (int i = 0; i < 4; ++i) w.out[l][i] = __float_as_uint(sum[l / 4 + i / 2 * 8][l % 4 * 2 + i % 2]);
    });
    for (int i = 0; i < 4; ++i) sums[i] = __uint_as_float(w.out[lane][i]);
}

inline void add_to_global(float* warps, const float (&of)[4]) {
    for (int e = 0; e < 4; ++e) warps[4 * (emulated::current->index % 32) + e] += of[e];
    ++emulated::current->additions;
}
inline void read_sums(float (&to)[4], const float* warps) {
    for (int e = 0; e < 4; ++e) to[e] = warps[4 * (emulated::current->index % 32) + e];
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float minus_infinity() { return -INFINITY; }
inline float infinity() { return INFINITY; }

}  // namespace cuflash
