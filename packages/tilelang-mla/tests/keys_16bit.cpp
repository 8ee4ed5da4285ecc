// keys_16bit.cuh on a CPU: the 512 threads of a program, WGMMA by its definition of fragments and swizzles, beside
// float64. Prints what was run, and the largest errors of a row relative to its largest value, of lse and of the maxima.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "lanes.h"
#include "numbers.h"
#include "threads.h"
#include "vectors.h"

#define MLA_ON_HOST
#define MLA_INLINE inline
#define MLA_METHOD inline
#define MLA_DEVICE static inline

using std::max;
using std::min;

// Threads

static Barrier everyone(512), weighing(128);
static std::vector<Barrier> groups(4, Barrier(128));

namespace mla::rows {
// Not used here.
void load(uint32_t *x, const uint8_t *from);
void load(float &x, const uint8_t *from);
void fetch(const void *, int);
void store(Shared to, uint32_t x, uint32_t y, uint32_t z, uint32_t w);
void store_four(float *to, bool there, float x, float y, float z, float w);
int own_rank();
Distance to_other(Shared);
void send(Shared from, int bytes, Distance distance, Shared);
void written_by_warp();
void expect(Shared, int bytes);
void widen(uint32_t four, uint32_t &low, uint32_t &high);
uint32_t scaled(uint32_t halves, float scale);
}  // namespace mla::rows

namespace mla {
// Not used here.
void together();
bool together(bool holds);
void read_by_warp();
void widen(uint32_t four, uint32_t &low, uint32_t &high);
uint32_t permuted(uint32_t a, uint32_t b, uint32_t which);
float2 floats(uint32_t x);
template <class Barrier> void arrive(Barrier &, int);
template <class Barrier> void copy(void *to, const void *from, int bytes, Barrier &);
template <int N, bool BF16> void multiply(const uint32_t *a, uint64_t b, float *c, bool add);
using Place = uint8_t *;
int own_rank();
Place of_other(const void *own);
float load_other(const void *own);
void give(Place to, const float *x);

static void visible_to_mma() {}
static void begin_products() {}
static void commit_products() {}
template <int LEFT> void await_products() {}
template <int COUNT> void keep(float *) {}
static float power(float x) { return exp2f(x); }
static uint32_t pack(float x, float y, bool bf16) {
  return bf16 ? to_bfloat16(x) | uint32_t(to_bfloat16(y)) << 16 : to_half(x) | uint32_t(to_half(y)) << 16;
}
static uint64_t operand(const void *p) { return reinterpret_cast<uint64_t>(p); }
static uint64_t uniform(uint64_t operand) { return operand; }
static uint64_t advanced(uint64_t operand, int bytes) { return operand + bytes; }

namespace bits16 {
static void of_weights() { weighing.arrive_and_wait(); }
static bool of_weights(bool holds) {
  // Of three calls one after the other: who is late still reads that of the one before.
  static bool any[3];
  static int calls[128];
  int call = calls[own]++;
  any[call % 3] |= holds;
  weighing.arrive_and_wait();
  any[(call + 2) % 3] = false;
  return any[call % 3];
}
static uint32_t transposed(uint32_t pair) {
  // Of a row's four threads each has two columns.
  int lane = own % 32, row = lane / 4, column = lane % 4 * 2;
  uint32_t result = 0;
  for (int i = 0; i < 32; i++) {
    uint32_t other = exchanged(pair, i);
    for (int e = 0; e < 2; e++)
      if (i / 4 == column + e && i % 4 == row / 2) result |= (other >> 16 * (row % 2) & 0xFFFF) << 16 * e;
  }
  return result;
}
// 16 bits of a matrix whose rows are 128 bytes, swizzled, eight of them in 1024 bytes.
static uint16_t element(uint64_t begin, int row, int byte) {
  uint64_t at = begin + row * 128 + byte;
  at ^= (at >> 7 & 7) << 4;
  return *reinterpret_cast<const uint16_t *>(at);
}
// m64nNk16, with both operands in shared memory; of COLUMNS a row of a is one of K.
template <int N, bool BF16, bool COLUMNS> static void multiply(uint64_t a, uint64_t b, float *c, bool add) {
  auto wide = [](uint16_t x) { return BF16 ? of_bfloat16(x) : of_half(x); };
  groups[own / 128].arrive_and_wait();
  for (int i = 0; i < N / 2; i++) {
    int n = 8 * (i / 4) + 2 * (own & 3) + i % 2, m = own % 128 / 32 * 16 + own % 32 / 4 + i % 4 / 2 * 8;
    float sum = add ? c[i] : 0;
    for (int k = 0; k < 16; k++) sum += wide(COLUMNS ? element(a, k, 2 * m) : element(a, m, 2 * k)) * wide(element(b, n, 2 * k));
    c[i] = sum;
  }
  groups[own / 128].arrive_and_wait();
}
}  // namespace bits16
}  // namespace mla

#include "rows.cuh"
#include "rows_of_keys.cuh"
#include "weights_of_keys.cuh"
#include "values_of_keys.cuh"

#include "keys_16bit.cuh"

static std::mt19937 numbers(7);
static double off(double want, double got) { return std::isnan(got) ? INFINITY : want == got ? 0 : fabs(got - want); }
static float normal() { return std::normal_distribution<float>()(numbers); }

// One list after the other, as a program has them; of each row the first keys are small, so that the maximum moves.
template <int N, int ROPE, bool BF16> void run(const char *name, int keys, int rows, bool sinks) {
  namespace b = mla::bits16;
  constexpr int WIDTH = 512 + ROPE, STAGES = 2;
  constexpr float SCALE = 0.3f, SINK = 0.5f;
  using S = b::Shape<N, ROPE, STAGES>;
  auto wide = [](uint16_t x) { return BF16 ? of_bfloat16(x) : of_half(x); };
  int blocks = (keys + 63) / 64;
  std::vector<uint16_t> q(rows * WIDTH), cache(blocks * 64 * WIDTH), out(rows * 512, 0x7FFF);
  for (auto &x : q) x = mla::pack(normal(), 0, BF16);
  for (size_t i = 0; i < cache.size(); i++) cache[i] = mla::pack(normal() * (i < 70 * WIDTH ? 0.3f : 1.f), 0, BF16);
  auto is_key = [&](int i) { return i < keys && i % 5 != 2; };
  std::vector<float> of_rows(42 * N, NAN), sink(rows, SINK);
  std::vector<uint8_t> valid(STAGES * 64);
  size_t bytes = S::ROPES + STAGES * b::OF_BLOCK + 1024;
  std::unique_ptr<uint8_t, decltype(&free)> held(static_cast<uint8_t *>(aligned_alloc(1024, bytes)), free);
  memset(held.get(), 0xFF, bytes);
  uint8_t *memory = held.get();
  float *known = of_rows.data();
  int slot = 1;
  run_threads(512, [&](int thread) {
    int group = thread / 128, own_thread = thread % 128;
    float s[N / 2], state[3 * N / 4], acc[2 * N] = {};
    if (group == 0) b::begin_rows<N>(state);
    if (group == 3) b::load_q<N, ROPE, STAGES>(memory, slot, q.data(), WIDTH, rows, own_thread);
    for (int i = 0; i < blocks; i++) {
      int stage = i % STAGES, buffer = (i + 1) % 2, key = 64 * i + own_thread / 32 * 16 + own_thread % 16;
      if (group == 3) {
        const void *from = &cache[key * WIDTH];
        valid[stage * 64 + key % 64] = is_key(key);
        b::copy_left<N, ROPE, STAGES>(memory, stage, from, is_key(key), own_thread);
        b::copy_right<N, ROPE, STAGES>(memory, stage, from, is_key(key), own_thread);
      }
      everyone.arrive_and_wait();
      if (group == 0) {
        b::score_half<N, ROPE, STAGES, BF16, false>(s, memory, slot, stage);
        b::score_half<N, ROPE, STAGES, BF16, true>(s, memory, slot, stage);
        b::weigh<N, ROPE, STAGES, BF16>(s, state, memory, known, &valid[64 * stage], SCALE, i % 2, buffer, own_thread);
      }
      everyone.arrive_and_wait();
      if (group == 1 || group == 2) {
        mla::rescale<N, false>(acc, known, buffer, own_thread);
        b::values<N, ROPE, STAGES, BF16>(acc, memory, group - 1, stage, buffer);
      }
    }
    if (group == 0) b::total<N>(state, known, slot, own_thread);
    everyone.arrive_and_wait();
    if (group == 1 || group == 2)
      b::store<N, BF16>(acc, known, group - 1, slot, out.data(), 512, rows, sink.data(), sinks, 0, own_thread);
  });
  double worst = 0, worst_lse = 0, worst_max = 0;
  for (int n = 0; n < rows; n++) {
    std::vector<double> weights(keys, -INFINITY);
    for (int i = 0; i < keys; i++) {
      if (!is_key(i)) continue;
      weights[i] = 0;
      for (int j = 0; j < WIDTH; j++) weights[i] += double(wide(cache[i * WIDTH + j])) * wide(q[n * WIDTH + j]) * SCALE;
    }
    double highest = *std::max_element(weights.begin(), weights.end()), sum = 0, error = 0, most = 0;
    for (double &x : weights) sum += x = exp2(x - highest);
    worst_lse = std::max(worst_lse, off(highest + log2(sum), of_rows[(22 + slot) * N + n] + log2(of_rows[(24 + slot) * N + n])));
    worst_max = std::max(worst_max, off(highest, of_rows[(16 + slot) * N + n]));
    if (sinks) sum += exp2(SINK / log(2.0) - highest);
    for (int j = 0; j < 512; j++) {
      double want = 0;
      for (int i = 0; i < keys; i++) want += weights[i] * wide(cache[i * WIDTH + j]) / sum;
      most = std::max(most, fabs(want));
      error = std::max(error, off(want, wide(out[n * 512 + j])));
    }
    worst = std::max(worst, error / most);
  }
  printf("%s: %g %g %g\n", name, worst, worst_lse, worst_max);
}

int main() {
  run<16, 64, true>("16 heads", 330, 16, false);
  run<16, 64, true>("11 heads with sinks", 100, 11, true);
  run<16, 0, false>("no rope, float16", 200, 16, true);
}
