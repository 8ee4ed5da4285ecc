// What kernels with keys as rows call of CUDA, on a CPU: a cluster's memory, and WGMMA by its definition of fragments and
// swizzles. Who includes it has defined THREADS of a program and how many of them are MAKING_WEIGHTS.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "threads.h"
#include "vectors.h"

#define MLA_ON_HOST
#define MLA_INLINE inline
#define MLA_DEVICE static inline

using std::max;
using std::min;

static Barrier everyone(THREADS), of_weights(MAKING_WEIGHTS);
static std::vector<Barrier> groups(4, Barrier(128));
static uint32_t operands[512][4];

namespace mla {
static void together() { of_weights.arrive_and_wait(); }
static bool together(bool holds) {
  // Of three calls one after the other: who is late still reads that of the one before.
  static bool any[3];
  static int calls[MAKING_WEIGHTS];
  int call = calls[own]++;
  any[call % 3] |= holds;
  of_weights.arrive_and_wait();
  any[(call + 2) % 3] = false;
  return any[call % 3];
}
static void visible_to_mma() {}
static void read_by_warp() { warps[own / 32].arrive_and_wait(); }
static void begin_products() {}
static void commit_products() {}
template <int LEFT> void await_products() {}
template <int COUNT> void keep(float *) {}
static float power(float x) { return exp2f(x); }
static float2 floats(uint32_t x) { return {of_half(x & 0xFFFF), of_half(x >> 16)}; }
static uint32_t pack(float x, float y, bool bf16) {
  return bf16 ? to_bfloat16(x) | uint32_t(to_bfloat16(y)) << 16 : to_half(x) | uint32_t(to_half(y)) << 16;
}
static void widen(uint32_t four, uint32_t &low, uint32_t &high) {
  low = pack(of_e4m3(four & 255), of_e4m3(four >> 8 & 255), false);
  high = pack(of_e4m3(four >> 16 & 255), of_e4m3(four >> 24), false);
}
static uint64_t operand(const void *p) { return reinterpret_cast<uint64_t>(p); }
static uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) {
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t one = which >> 4 * i, byte = both >> 8 * (one & 7) & 255;
    result |= (one & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return result;
}
static uint64_t uniform(uint64_t operand) { return operand; }
static uint64_t advanced(uint64_t operand, int bytes) { return operand + bytes; }
template <class Barrier> void arrive(Barrier &, int) {}
template <class Barrier> void copy(void *to, const void *from, int bytes, Barrier &) { memcpy(to, from, bytes); }

// Programs of a cluster, one after the other: what they have lies side by side, and each first finishes what is before
// the cluster's barrier.
using Place = uint8_t *;
struct Program {
  uint8_t *begin;
  size_t bytes;
};
static std::vector<Program> own_memory;
static int rank_of_program;
static int own_rank() { return rank_of_program; }
static Place of_other(const void *own) {
  auto *place = static_cast<Place>(const_cast<void *>(own));
  for (auto [begin, bytes] : own_memory)
    if (begin <= place && place < begin + 2 * bytes) return rank_of_program ? place - bytes : place + bytes;
  return nullptr;
}
static float load_other(const void *own) { return *reinterpret_cast<float *>(of_other(own)); }
static void give(Place to, const float *x) { memcpy(to, x, 16); }

// A tensor core's sum: it cuts off what lies so many bits below the largest term.
template <int COUNT> static float cut_sum(const float (&terms)[COUNT], float before, int bits) {
  int highest = before == 0 ? -1000 : ilogbf(before);
  bool finite = std::isfinite(before);
  for (float x : terms) finite &= std::isfinite(x), highest = x == 0 ? highest : max(highest, ilogbf(x));
  if (!finite) return NAN;
  double step = ldexp(1., highest - bits), sum = trunc(before / step);
  for (float x : terms) sum += trunc(x / step);
  return float(sum * step);
}
constexpr int OF_16_BITS = 24, OF_8_BITS = 13;

// m64nNk16: of operand A a thread has rows g and g + 8 of its warp's 16, columns 2 t and 2 t + 1, and those 8 behind.
template <int N, bool BF16> void multiply(const uint32_t *a, uint64_t b, float *c, bool add) {
  memcpy(operands[own], a, 16);
  groups[own / 128].arrive_and_wait();
  for (int i = 0; i < N / 2; i++) {
    int n = 8 * (i / 4) + 2 * (own & 3) + i % 2, lower = i % 4 / 2;
    float terms[16];
    for (int k = 0; k < 16; k++) {
      uint32_t pair = operands[(own & ~3) + k % 8 / 2][lower + 2 * (k / 8)];
      uint64_t at = b + n * 128 + 2 * k;
      at ^= (at >> 7 & 7) << 4;
      uint16_t x = k % 2 ? pair >> 16 : pair, y = *reinterpret_cast<const uint16_t *>(at);
      terms[k] = BF16 ? of_bfloat16(x) * of_bfloat16(y) : of_half(x) * of_half(y);
    }
    c[i] = cut_sum(terms, add ? c[i] : 0, OF_16_BITS);
  }
  groups[own / 128].arrive_and_wait();
}
}  // namespace mla
