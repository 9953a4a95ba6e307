// tanh for scores that are capped: relative error 2^-21.
#pragma once

#include "common/ptx_ampere.cuh"

namespace cuflash {

// Two approximate instructions, whose result loses digits near 0, where a series serves instead. tanh.approx has 2^-11, too
// coarse for what the cap multiplies.
__device__ __forceinline__ float tanh_exact(float x) {
    const float square = x * x;
    const float series = fmaf(fmaf(fmaf(-17.f / 315.f, square, 2.f / 15.f), square, -1.f / 3.f), square, 1.f);
    const float far = 1.f - __fdividef(2.f, 1.f + exp2_approx(2.885390082f * x));
    return fabsf(x) < 0.2f ? x * series : far;
}

}  // namespace cuflash
