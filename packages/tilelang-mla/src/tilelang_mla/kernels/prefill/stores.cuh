// Rows of a tile from WGMMA's accumulators to memory. Of eight columns a thread has two, and four threads all: stored as
// they are, a warp writes halves of sectors. Neighbours give each other two columns of one of two eights, by which four
// threads write a whole sector of 32 bytes. Eight columns a thread, 16 bytes, are as fast, but 33 tokens behind 16384 of
// 128 heads took 397 us for 319 by them (H200).

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
#endif

// A thread's accumulators, one by one, to an array of its own.
MLA_DEVICE void keep(float *own, int i, float x) { own[i] = x; }

// own: of 64 rows to a warpgroup, of COLUMNS each. rows: how many of a tile's there are. All threads of a warp are here.
template <int COLUMNS, bool BF16>
MLA_DEVICE void store_rows(const float *own, void *out, int64_t stride, int rows, int thread) {
  bool odd = thread & 1;
  int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 2 * 8 + thread % 4 / 2 * 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint16_t *to = static_cast<uint16_t *>(out) + (row + 8 * half) * stride + column;
    bool there = row + 8 * half < rows;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
      const float *x = own + 8 * i + 2 * half;
      uint32_t first = pack<BF16>(x[0], x[1]), second = pack<BF16>(x[4], x[5]);
      uint32_t other = given_by(odd ? first : second, 1);
      uint2 four = odd ? make_uint2(other, second) : make_uint2(first, other);
      if (there) *reinterpret_cast<uint2 *>(to + 16 * i) = four;
    }
  }
}

}  // namespace mla::tiles

#endif
