// Products with 256 columns as two with 128 each: of four warpgroups ptxas gives one instruction 128 registers.

#include <cuda.h>
#include <tl_templates/cuda/instruction/wgmma.h>

namespace tl {

// Chunks of 64 columns of 64 rows lie 8192 bytes behind each other.
constexpr uint64_t SECOND_HALF = 2 * 8192 >> 4;

#define MLA_HALVES(TYPE)                                                                                              \
  template <> struct WgmmaSSImpl<DataType::TYPE, DataType::TYPE, DataType::kFloat32, 64, 256, 16, false, true, 1, 1> { \
    using Half = WgmmaSSImpl<DataType::TYPE, DataType::TYPE, DataType::kFloat32, 64, 128, 16, false, true, 1, 1>;      \
    TL_DEVICE static void execute(uint64_t a, uint64_t b, uint32_t *c, bool scale) {                                   \
      Half::execute(a, b, c, scale);                                                                                   \
      Half::execute(a, b + SECOND_HALF, c + 64, scale);                                                                \
    }                                                                                                                  \
  };                                                                                                                   \
  template <> struct WgmmaRSImpl<DataType::TYPE, DataType::TYPE, DataType::kFloat32, 64, 256, 16, false, true, 1, 1> { \
    using Half = WgmmaRSImpl<DataType::TYPE, DataType::TYPE, DataType::kFloat32, 64, 128, 16, false, true, 1, 1>;      \
    TL_DEVICE static void execute(const uint32_t *a, uint64_t b, uint32_t *c, bool scale) {                            \
      Half::execute(a, b, c, scale);                                                                                   \
      Half::execute(a, b + SECOND_HALF, c + 64, scale);                                                                \
    }                                                                                                                  \
  };

MLA_HALVES(kBFloat16)
MLA_HALVES(kFloat16)

#undef MLA_HALVES

}  // namespace tl
