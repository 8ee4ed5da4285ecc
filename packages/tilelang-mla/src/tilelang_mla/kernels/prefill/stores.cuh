// Rows of a tile from WGMMA's accumulators to memory. Of eight columns a thread has two, and four threads all: stored as
// they are, a warp writes halves of sectors. Four threads give each other columns, until each has eight of one of 32.

#ifndef MLA_TILES
#define MLA_TILES

#include <cstdint>

#ifndef MLA_ON_HOST
#define MLA_DEVICE static __device__ __forceinline__
#endif

namespace mla::tiles {

#ifndef MLA_ON_HOST
template <bool BF16> MLA_DEVICE uint32_t pack(float x, float y) {
  uint32_t both;
  if (BF16)
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
  else
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x), "f"(y));
  return both;
}
MLA_DEVICE uint32_t given_by(uint32_t x, int apart) { return __shfl_xor_sync(~0u, x, apart); }
MLA_DEVICE void store(uint16_t *to, uint2 x, uint2 y, bool there) {
  // By itself the compiler stores some of them word by word.
  if (there)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(y.x), "r"(y.y) : "memory");
}
#endif

// A thread's accumulators, one by one, to an array of its own.
MLA_DEVICE void keep(float *own, int i, float x) { own[i] = x; }

// own: of 64 rows to a warpgroup, of COLUMNS each. rows: how many of a tile's there are. All threads of a warp are here.
template <int COLUMNS, bool BF16>
MLA_DEVICE void store_rows(const float *own, void *out, int64_t stride, int rows, int thread) {
  bool odd = thread & 1, upper = thread & 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    uint16_t *to = static_cast<uint16_t *>(out) + row * stride + thread % 4 * 8;
#pragma unroll
    for (int i = 0; i < COLUMNS / 32; i++) {
      uint32_t x[4], kept[2], given[2];
#pragma unroll
      for (int k = 0; k < 4; k++) x[k] = pack<BF16>(own[16 * i + 4 * k + 2 * half], own[16 * i + 4 * k + 2 * half + 1]);
      // Two that are two apart halve the four eights, and neighbours the two that are left.
#pragma unroll
      for (int k = 0; k < 2; k++) {
        kept[k] = upper ? x[2 + k] : x[k];
        given[k] = given_by(upper ? x[k] : x[2 + k], 2);
      }
      uint32_t own_one = odd ? kept[1] : kept[0], beside = given_by(odd ? kept[0] : kept[1], 1);
      uint32_t far_one = odd ? given[1] : given[0], far_beside = given_by(odd ? given[0] : given[1], 1);
      uint2 near = odd ? uint2{beside, own_one} : uint2{own_one, beside};
      uint2 far = odd ? uint2{far_beside, far_one} : uint2{far_one, far_beside};
      store(to + 32 * i, upper ? far : near, upper ? near : far, row < rows);
    }
  }
}

}  // namespace mla::tiles

#endif
