// The lines of a warpgroup in registers. A thread holds two of its 64, 8 apart, of a tile's scores and of out: of column
// tile t (8 columns) elements 4 t and 4 t + 1 of the first line, 4 t + 2 and 4 t + 3 of the second, in columns 8 t + 2 (lane
// % 4) and the next.
#pragma once

#include "sm90/work.cuh"

namespace cuflash {

typedef CONFIG_SCORE Product;  // int where Q and K are
typedef Product Products[Config::BN / 2];
typedef float Scores[Config::BN / 2];
__device__ __forceinline__ Scores& as_floats(float (&products)[Config::BN / 2]) { return products; }
__device__ __forceinline__ Scores& as_floats(int (&products)[Config::BN / 2]) {  // in the same registers
    Scores& scores = reinterpret_cast<Scores&>(products);
#pragma unroll
    for (int i = 0; i < Config::BN / 2; ++i) scores[i] = float(products[i]);
    return scores;
}
typedef float Out[Config::DV / 2];
typedef u32 Weights[Config::BN * Config::ITEM / 8];  // what a product takes as its rows
typedef u32 Weights16[Config::BN / 4];

// What a thread is of its warpgroup.
struct Thread {
    u32 index;
    __device__ __forceinline__ Thread() : index(threadIdx.x) {}
    __device__ __forceinline__ int lane() const { return index % 32; }
    __device__ __forceinline__ int warp_row() const { return index / 32 % 4 * 16; }
    __device__ __forceinline__ int line(int half) const { return warp_row() + lane() / 4 + 8 * half; }
};

// Which of some columns a thread's rows see.
struct Seen {
    int low[2], high[2];

    __device__ __forceinline__ bool hides(int element) const {
        const int half = element / 2 % 2, column = 2 * (element - 2 * half) - element % 2;
        return column > high[half] || (Config::LEFT && column < low[half]);
    }
};

// Which keys a thread's rows see: less the columns of the lane.
struct Sight {
    int centre[2], last;  // keys that the rows are aligned with; last key

    __device__ __forceinline__ Sight(const Work& work, const int (&rows)[2]) {
        const int column = 2 * (threadIdx.x % 4);
        centre[0] = rows[0] + work.diagonal - column, centre[1] = rows[1] + work.diagonal - column;
        last = work.kv_len - 1 - column;
    }
    // Of columns that start with a key.
    __device__ __forceinline__ Seen from(int key, const Arguments& a) const {
        Seen seen;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = centre[half] - key, end = last - key;
            seen.high[half] = Config::BOUNDED ? min(at + a.right, end) : end, seen.low[half] = at - a.left;
        }
        return seen;
    }
};

}  // namespace cuflash
