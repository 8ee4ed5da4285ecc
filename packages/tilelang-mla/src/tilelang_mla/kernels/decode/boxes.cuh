// Blocks of 64 keys in pages of a multiple of 16: each warp of the producer asks TMA for its KEYS keys, which lie in one
// page. Together they lie in shared memory as one box of 64 keys does.

#ifndef MLA_BOXES
#define MLA_BOXES

#ifndef MLA_ON_HOST
#include <cuda.h>
#include <tl_templates/cuda/copy_sm90.h>
#define MLA_DEVICE static __device__ __forceinline__
#endif

namespace mla::boxes {

constexpr int LINE = 128, CHUNK = 64 * LINE;

// Of the keys from a row of a page on, CHUNKS chunks of 64 elements of 16 bits, from an element on; zeros of a page that
// the pool does not have.
template <int KEYS, int CHUNKS, class Barrier>
MLA_DEVICE void load(
    const CUtensorMap &keys, Barrier &full, void *ring, int element, int page, int row, int thread) {
  if (thread & 31) return;
  full.expect_transaction(CHUNKS * KEYS * LINE);
  uint8_t *to = static_cast<uint8_t *>(ring) + (thread >> 5) * KEYS * LINE;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) tl::tma_load(keys, full, to + c * CHUNK, element + 64 * c, row, page);
}

}  // namespace mla::boxes

#endif
