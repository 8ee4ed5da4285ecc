// records.cuh on a CPU: 384 threads, WGMMA by its definition of fragments and swizzles, beside float64.
// Prints what was run, the largest error of a row relative to its largest value, and that of lse.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

constexpr int THREADS = 384, MAKING_WEIGHTS = 128;
#include "products.h"

namespace mla {
namespace records {
static void of_weights() { mla::together(); }
static bool of_weights(bool holds) { return mla::together(holds); }
static void fetch_line(const void *) {}
template <bool BF16 = false> static uint32_t product(uint32_t x, uint32_t y) {
  auto wide = [](uint16_t z) { return BF16 ? of_bfloat16(z) : of_half(z); };
  return pack(wide(x) * wide(y), wide(x >> 16) * wide(y >> 16), BF16);
}
}  // namespace records
}  // namespace mla

#include "rows_of_keys.cuh"
#include "weights_of_keys.cuh"
#include "values_of_keys.cuh"

#include "records.cuh"

static std::mt19937 numbers(7);
// NaN is as far off as can be.
static double off(double want, double got) { return std::isnan(got) ? INFINITY : fabs(got - want); }
static float normal() { return std::normal_distribution<float>()(numbers); }

template <bool BF16> void run(const char *name, int keys, int rows, bool part) {
  namespace w = mla::records;
  constexpr int N = 64, WIDTH = 576;
  constexpr float SCALE = 0.05f;
  auto wide = [](uint16_t x) { return BF16 ? of_bfloat16(x) : of_half(x); };
  int blocks = (keys + 63) / 64;
  numbers.seed(7);
  std::vector<uint16_t> q(rows * WIDTH), out(rows * 512);
  for (size_t i = 0; i < q.size(); i++) q[i] = mla::pack(normal() * exp2f(i / WIDTH % 3 - 1.f), 0, BF16);
  std::vector<float> parts(rows * 512), of_rows(42 * N, NAN);
  std::vector<int> limits(N);
  std::vector<std::vector<double>> exact(keys, std::vector<double>(WIDTH));
  size_t bytes = (w::RAW + size_t(blocks) * w::STAGE + 2047) / 1024 * 1024;
  std::unique_ptr<uint8_t, decltype(&free)> held(static_cast<uint8_t *>(aligned_alloc(1024, bytes)), free);
  memset(held.get(), 0xFF, bytes);
  uint64_t barrier = 0;
  for (int n = 0; n < N; n++) limits[n] = keys - n % 3;
  for (int i = 0; i < blocks * 64; i++) {
    if (i >= keys) {
      w::zero_key(held.get(), i / 64, i % 64);
      continue;
    }
    std::vector<uint8_t> key(w::ROW);
    for (int j = 0; j < 512; j++) {
      key[j] = numbers() % (i < 64 ? 0x30 : 0x60) | (numbers() & 128);
      exact[i][j] = of_e4m3(key[j]);
    }
    for (int j = 0; j < 512; j++) {
      float scale = 0.003f * (1 + i / 64) * (1 + j / 128) * (1 + i % 7);
      memcpy(&key[mla::SCALES + j / 128 * 4], &scale, 4);
      exact[i][j] *= scale;
    }
    for (int j = 0; j < 64; j++) {
      uint16_t x = to_bfloat16(normal());
      memcpy(&key[mla::ROPES + 2 * j], &x, 2);
      exact[i][512 + j] = of_bfloat16(x);
    }
    w::load_keys(held.get(), i / 64, i % 64, key.data(), 1, barrier);
  }
  uint8_t *matrices = held.get();
  float *known = of_rows.data();
  run_threads(384, [&](int thread) {
    if (thread < 128) {
      float s[N / 2], up[2], sums[N / 4] = {};
      w::load_q<BF16>(matrices, known, q.data(), WIDTH, rows, SCALE, thread);
      mla::together();
      for (int i = 0; i < blocks; i++) {
        w::scores<BF16>(s, up, matrices, i, thread);
        w::weigh(s, up, sums, matrices, i, known, limits.data(), 64 * i, i == blocks - 1, i % 2, (i + 1) % 2, thread);
        everyone.arrive_and_wait();
      }
      w::total(sums, known, blocks % 2, 1, thread);
      everyone.arrive_and_wait();
      return;
    }
    thread -= 128;
    float acc[2 * N] = {};
    for (int i = 0; i < blocks; i++) {
      everyone.arrive_and_wait();
      mla::rescale<N, true>(acc, known, (i + 1) % 2, thread);
      w::values(acc, matrices, i, (i + 1) % 2, barrier, thread);
    }
    everyone.arrive_and_wait();
    if (part) mla::store<N, true, BF16, true>(acc, known, 1, parts.data(), 512, rows, 1.f, known, 0, 0, thread);
    else mla::store<N, true, BF16, false>(acc, known, 1, out.data(), 512, rows, 1.f, known, 0, 0, thread);
  });
  double worst = 0, worst_lse = 0;
  for (int n = 0; n < rows; n++) {
    std::vector<double> weights(keys, -INFINITY);
    for (int i = 0; i < keys; i++) {
      if (i >= limits[n]) continue;
      weights[i] = 0;
      for (int j = 0; j < WIDTH; j++) weights[i] += exact[i][j] * wide(q[n * WIDTH + j]) * SCALE;
    }
    double highest = *std::max_element(weights.begin(), weights.end()), sum = 0, error = 0, most = 0;
    for (double &x : weights) sum += x = exp2(x - highest);
    double lse = of_rows[23 * N + n] + log2(of_rows[25 * N + n]);
    worst_lse = std::max(worst_lse, off(highest + log2(sum), lse));
    for (int j = 0; j < 512; j++) {
      double want = 0;
      for (int i = 0; i < keys; i++) want += weights[i] * exact[i][j] / sum;
      most = std::max(most, fabs(want));
      error = std::max(error, off(want, part ? parts[n * 512 + j] : wide(out[n * 512 + j])));
    }
    worst = std::max(worst, error / most);
  }
  printf("%s: %g %g\n", name, worst, worst_lse);
}

int main() {
  run<true>("64 rows", 200, 64, false);
  run<true>("50 rows, a part", 130, 50, true);
}
