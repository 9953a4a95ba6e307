// Stands for the header of that name, as far as the kernels that quantise need it, and for the parts of CUDA C++ and the
// instructions that they alone use. Kernels run one after another, and so do their blocks.
#pragma once

#include "common/ptx_ampere.cuh"

inline float2 make_float2(float x, float y) { return {x, y}; }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    const unsigned long long both = x | (unsigned long long)y << 32;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= unsigned(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
template <class T>
inline T __ldg(const T* from) {
    if (std::uintptr_t(from) % sizeof(T)) emulated::fail("an address of memory is not aligned");
    return *from;
}
template <class T>
inline T __ldcg(const T* from) { return __ldg(from); }
template <class T>
inline void __stcg(T* to, T value) { *to = value; }
inline void atomicAdd(unsigned long long* to, unsigned long long value) { *to += value; }

namespace cuflash {

inline void await_kernel_before() {}
inline void let_next_kernel_start() {}

}  // namespace cuflash

// Instructions by their names, with "_" for what no name of C++ has.
namespace emulated {

inline void createpolicy_fractional_L2_evict_first_b64(unsigned long long&) {}
inline void ld_global_nc_L1_no_allocate_L2_cache_hint_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w,
                                                             const void* from, unsigned long long) {
    const uint4 unit = __ldg(static_cast<const uint4*>(from));
    x = unit.x, y = unit.y, z = unit.z, w = unit.w;
}

inline void max_NaN_xorsign_abs_f32(float& most, float x, float y) {
    const float size = std::fmax(std::fabs(x), std::fabs(y));
    most = std::isnan(x) || std::isnan(y) ? NAN : std::signbit(x) != std::signbit(y) ? -size : size;
}

inline unsigned half_of(unsigned code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float size = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    return cuflash::rounded((code & 127) == 127 ? NAN : code >> 7 & 1 ? -size : size, cuflash::Float16());
}
inline void cvt_rn_f16x2_e4m3x2(unsigned& pair, unsigned short codes) {
    pair = half_of(codes & 255) | half_of(codes >> 8) << 16;
}

inline void atom_acq_rel_gpu_global_add_u32(unsigned& before, unsigned* counter) { before = (*counter)++; }

}  // namespace emulated
