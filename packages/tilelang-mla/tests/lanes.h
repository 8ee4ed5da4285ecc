// What lanes of a warp tell each other, and what rows.cuh makes of it, for up to 512 of the threads of threads.h.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "threads.h"

static std::vector<Barrier> warps(16, Barrier(32));
static uint64_t handed[512];

template <class X> static X exchanged(X x, int lane) {
  handed[own] = 0;
  memcpy(&handed[own], &x, sizeof(x));
  warps[own / 32].arrive_and_wait();
  X other;
  memcpy(&other, &handed[own / 32 * 32 + lane], sizeof(x));
  warps[own / 32].arrive_and_wait();
  return other;
}

static float __shfl_xor_sync(uint32_t, float x, int step) { return exchanged(x, own % 32 ^ step); }
static float __shfl_sync(uint32_t, float x, int lane) { return exchanged(x, lane); }

static bool __any_sync(uint32_t, bool x) {
  handed[own] = x;
  warps[own / 32].arrive_and_wait();
  const uint64_t *first = handed + own / 32 * 32;
  bool any = std::any_of(first, first + 32, [](uint64_t y) { return y; });
  warps[own / 32].arrive_and_wait();
  return any;
}

namespace mla::rows {
using Shared = uint8_t *;
using Distance = ptrdiff_t;
static Shared shared(void *p) { return static_cast<uint8_t *>(p); }
static const uint8_t *of_lane(const void *p, int lane) { return static_cast<const uint8_t *>(exchanged(p, lane)); }
static float of_lane(float x, int lane) { return exchanged(x, lane); }
static uint32_t of_warp(bool x) {
  uint32_t all = 0;
  for (int lane = 0; lane < 32; lane++) all |= uint32_t(exchanged(x, lane)) << lane;
  return all;
}
template <bool LINES> static void copy(Shared to, const uint8_t *from, bool there) { there ? memcpy(to, from, 16) : memset(to, 0, 16); }
}  // namespace mla::rows
