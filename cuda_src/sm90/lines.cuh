// The lines of a warpgroup in registers. A thread holds two of its 64, 8 apart, of a tile's scores and of out: of column tile t
// (8 columns) elements 4 t and 4 t + 1 of the first line, 4 t + 2 and 4 t + 3 of the second, in columns 8 t + 2 (lane % 4) and
// the next.
#pragma once

#include "sm90/work.cuh"

namespace cuflash {

typedef CONFIG_SCORE Score;  // int where Q and K are
typedef Score Scores[Config::BN / 2];
typedef float Out[Config::DV / 2];
typedef u32 Weights[Config::BN * Config::ITEM / 8];  // what a product takes as its rows

__device__ __forceinline__ void put_minus_infinity(float& score) { score = minus_infinity(); }
__device__ __forceinline__ void put_minus_infinity(int& score) { score = 0xff800000; }

// Which keys a thread's rows see: as columns of a tile, less those of the lane.
struct Sight {
    int centre[2], last;  // keys that the rows are aligned with; last key

    __device__ __forceinline__ Sight(const Work& work, const int (&rows)[2]) {
        const int column = 2 * (threadIdx.x % 4);
        centre[0] = rows[0] + work.diagonal - column, centre[1] = rows[1] + work.diagonal - column;
        last = work.kv_len - 1 - column;
    }
    // Selects, so that what a hidden key holds does not matter.
    __device__ __forceinline__ void hide(Scores& scores, int tile, const Arguments& a) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = centre[half] - tile * Config::BN, end = last - tile * Config::BN;
            const int high = Config::BOUNDED ? min(at + a.right, end) : end, low = at - a.left;
#pragma unroll
            for (int i = 2 * half; i < Config::BN / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int column = 2 * (i - 2 * half) + e;
                    if (column > high || (Config::LEFT && column < low)) put_minus_infinity(scores[i + e]);
                }
        }
    }
};

}  // namespace cuflash
