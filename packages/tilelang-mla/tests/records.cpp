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

// JOINED: two programs have half of the blocks each.
template <bool BF16, bool LISTS = false, bool JOINED = false>
void run(const char *name, int keys, int rows, bool part) {
  namespace w = mla::records;
  constexpr int N = 64, WIDTH = 576;
  constexpr float SCALE = 0.05f, SINK = 0.5f;
  auto wide = [](uint16_t x) { return BF16 ? of_bfloat16(x) : of_half(x); };
  int blocks = (keys + 63) / 64;
  numbers.seed(7);
  std::vector<uint16_t> q(rows * WIDTH), out(rows * 512);
  for (size_t i = 0; i < q.size(); i++) q[i] = mla::pack(normal() * exp2f(i / WIDTH % 3 - 1.f), 0, BF16);
  std::vector<float> parts(rows * 512), sinks(rows, SINK), of_rows(84 * N, NAN);
  std::vector<uint8_t> valid(blocks * 64);
  std::vector<int> limits(N);
  std::vector<std::vector<double>> exact(keys, std::vector<double>(WIDTH));
  // q is in two stages more.
  size_t bytes = (w::RAW + size_t(blocks + 2) * w::STAGE + 2047) / 1024 * 1024;
  std::unique_ptr<uint8_t, decltype(&free)> held(static_cast<uint8_t *>(aligned_alloc(1024, 2 * bytes)), free);
  memset(held.get(), 0xFF, 2 * bytes);
  uint64_t barrier = 0;
  for (int n = 0; n < N; n++) limits[n] = keys - n % 3;
  for (int i = 0; i < blocks * 64; i++) {
    valid[i] = i < keys && (!LISTS || i % 5 != 2);
    if (!valid[i]) {
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
  for (int n = 0; n < rows; n++) w::load_row(held.get(), blocks + n / 32, n % 32, &q[n * WIDTH], barrier);
  memcpy(held.get() + bytes, held.get(), bytes);
  mla::own_memory = {{held.get(), bytes}, {reinterpret_cast<uint8_t *>(of_rows.data()), 168 * N}};
  uint8_t *matrices = held.get();
  float *known = of_rows.data();
  int first = 0, last = JOINED ? blocks / 2 : blocks;
  std::vector<float> accumulated(2 * 256 * 2 * N), by(2 * 256 * N / 4);
  auto of = [&](int thread) { return 256 * mla::rank_of_program + thread; };
  auto each_program = [&](int threads, auto run) {
    for (mla::rank_of_program = 0; mla::rank_of_program < 1 + JOINED; mla::rank_of_program++) {
      if (mla::rank_of_program) matrices += bytes, known += 42 * N, first = last, last = blocks;
      run_threads(threads, run);
    }
    matrices = held.get(), known = of_rows.data(), mla::rank_of_program = 0;
  };
  each_program(384, [&](int thread) {
    if (thread < 128) {
      float s[N / 2], up[2], sums[N / 4] = {};
      w::lift_q<BF16>(matrices, known, blocks, blocks + 1, rows, SCALE, thread);
      mla::together();
      for (int i = first; i < last; i++) {
        w::scores<BF16>(s, up, matrices, i, thread);
        w::weigh<LISTS>(
            s, up, sums, matrices, i, known, limits.data(), &valid[64 * i], 64 * i, i == blocks - 1, (i - first) % 2,
            (i + 1) % 2, thread);
        everyone.arrive_and_wait();
      }
      w::total(sums, known, (last - first) % 2, 1, thread);
      everyone.arrive_and_wait();
      return;
    }
    thread -= 128;
    float acc[2 * N] = {};
    for (int i = first; i < last; i++) {
      everyone.arrive_and_wait();
      mla::rescale<N, true>(acc, known, (i + 1) % 2, thread);
      w::values(acc, matrices, i, (i + 1) % 2, barrier, thread);
    }
    everyone.arrive_and_wait();
    std::copy_n(acc, 2 * N, &accumulated[of(thread) * 2 * N]);
    if (JOINED) return;
    if (part) mla::store<N, true, BF16, true>(acc, known, 1, parts.data(), 512, rows, 1.f, sinks.data(), 0, 0, thread);
    else mla::store<N, true, BF16, false>(acc, known, 1, out.data(), 512, rows, 1.f, sinks.data(), LISTS, 0, thread);
  });
  if constexpr (JOINED) {
    each_program(256, [&](int thread) {
      float *acc = &accumulated[of(thread) * 2 * N];
      w::give_half(acc, &by[of(thread) * N / 4], matrices, known, 1, rows, 1.f, sinks.data(), LISTS, 0, thread);
    });
    each_program(256, [&](int thread) {
      const float *acc = &accumulated[of(thread) * 2 * N];
      w::store_half<BF16>(acc, &by[of(thread) * N / 4], matrices, out.data(), 512, rows, thread);
    });
  }
  double worst = 0, worst_lse = 0;
  for (int n = 0; n < rows; n++) {
    std::vector<double> weights(keys, -INFINITY);
    for (int i = 0; i < keys; i++) {
      if (!valid[i] || (!LISTS && i >= limits[n])) continue;
      weights[i] = 0;
      for (int j = 0; j < WIDTH; j++) weights[i] += exact[i][j] * wide(q[n * WIDTH + j]) * SCALE;
    }
    double highest = *std::max_element(weights.begin(), weights.end()), sum = 0, error = 0, most = 0;
    for (double &x : weights) sum += x = exp2(x - highest);
    double lse = of_rows[23 * N + n] + log2(of_rows[25 * N + n]);
    if constexpr (JOINED) lse = mla::joined_log<N>(known, 1, n) + log2(mla::joined_sum<N>(known, 1, n));
    worst_lse = std::max(worst_lse, off(highest + log2(sum), lse));
    if (LISTS && !part) sum += exp2(SINK / log(2.0) - highest);
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
  run<true, true>("lists with sinks, 64 rows", 200, 64, false);
  run<true, true, true>("lists with sinks in two programs, 50 rows", 200, 50, false);
}
