// Blocks of 64 keys, each of them anywhere in the cache, as TMA with a swizzle of 128 bytes would write them: a row of
// shared memory is 64 elements of 16 bits of a key, 64 of them a chunk, and the chunks of a ring lie behind each other.
//
// A producer warp has KEYS keys, 16 or, of two warpgroups, 8. A lane is told where one of them is, and asks the others
// for theirs: addresses are in registers, and all that tells loads of a key apart are constants. Keys of 16 bits are
// copied asynchronously. Those of 8 bits come by L2 to registers, and go to shared memory in q's dtype.
//
// RECORDS: keys of 656 bytes (512 e4m3, 4 scales, 64 ropes of bfloat16), else 64 ropes of e4m3 behind the latents, and
// one scale, which is not applied here.
//
// Two programs of a cluster, whose tiles of rows attend to the same keys, may widen half of a block's each and write it to
// both. A stage is free when the rows of both have been multiplied.

#ifndef MLA_ROWS
#define MLA_ROWS

#include <cstdint>

#ifndef MLA_ON_HOST
#include <cuda_fp16.h>
#define MLA_METHOD __device__ __forceinline__
#define MLA_DEVICE static __device__ __forceinline__
#endif

namespace mla::rows {

constexpr int LINE = 128, CHUNK = 64 * LINE, LATENT = 512, SCALES = 512, ROPES = 528;

#ifndef MLA_ON_HOST
// An address in shared memory, and how far two are apart.
using Shared = uint32_t;
using Distance = uint32_t;
MLA_DEVICE Shared shared(void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
MLA_DEVICE const uint8_t *of_lane(const void *p, int lane) {
  return reinterpret_cast<const uint8_t *>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(p), lane));
}
MLA_DEVICE float of_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }
MLA_DEVICE uint32_t of_warp(bool x) { return __ballot_sync(~0u, x); }
// 16 bytes to shared memory, zeros of a key that is none. LINES: L2 asks memory for 128 bytes at a time.
template <bool LINES> MLA_DEVICE void copy(Shared to, const uint8_t *from, bool there) {
  int bytes = there ? 16 : 0;
  if (LINES)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// In flight behind what follows.
MLA_DEVICE void load(uint32_t *x, const uint8_t *from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}
MLA_DEVICE void load(float &x, const uint8_t *from) { asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from)); }
// To L2.
MLA_DEVICE void fetch(const void *from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}
MLA_DEVICE void store(Shared to, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Which of a cluster's two programs this is, and how far the other's shared memory lies behind its own.
MLA_DEVICE int own_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
MLA_DEVICE Distance to_other(Shared own) {
  Shared other;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(own_rank() ^ 1));
  return other - own;
}
// Bytes that a warp has written to the same place of the other program's memory, whose barrier counts them.
MLA_DEVICE void send(Shared from, int bytes, Distance distance, Shared barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(from + distance), "r"(from), "r"(bytes), "r"(barrier) : "memory");
}
MLA_DEVICE void written_by_warp() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
}
MLA_DEVICE void expect(Shared barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// A warp is done with a stage: one of its lanes says so to both programs.
template <class Barrier> MLA_DEVICE void free_both(Barrier &empty, int thread) {
  Shared own = shared(&empty);
  if (thread & 31) return;
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(own) : "memory");
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(own + to_other(own)) : "memory");
}
// Four numbers to memory, if they are to be: nvcc would branch round each store.
MLA_DEVICE void store_four(float *to, bool there, float x, float y, float z, float w) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.v4.f32 [%0], {%1, %2, %3, %4};}"
               ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w), "r"(int(there)) : "memory");
}
// Four numbers of e4m3 to float16.
MLA_DEVICE void widen(uint32_t four, uint32_t &low, uint32_t &high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high) : "r"(four));
}
// Two numbers of float16, each times a scale, to bfloat16.
MLA_DEVICE uint32_t scaled(uint32_t halves, float scale) {
  float2 x = __half22float2(*reinterpret_cast<__half2 *>(&halves));
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(both) : "f"(x.x * scale), "f"(x.y * scale));
  return both;
}
#endif

#ifndef MLA_ON_HOST
// A number to a place in the program's memory, and what the other one of a cluster has put there in its own.
MLA_DEVICE void put(void *own, int place, float x) { static_cast<float *>(own)[place] = x; }
MLA_DEVICE float of_other(void *own, int place) {
  float x;
  Shared at = shared(own) + 4 * place;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(at + to_other(at)) : "memory");
  return x;
}
// Where a warpgroup's thread has its accumulators in a ring, 128 floats apart, and where in the other program's.
MLA_DEVICE int here(void *ring, int thread) { return shared(ring) + 4 * thread; }
MLA_DEVICE int there(void *ring, int thread) {
  Shared own = here(ring, thread);
  return own + to_other(own);
}
// One of them to there, and what the other program has given.
MLA_DEVICE void give(int there, int number, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there + 512 * number), "f"(x) : "memory");
}
MLA_DEVICE float given(int here, int number) {
  float x;
  asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(x) : "r"(here + 512 * number) : "memory");
  return x;
}
// Whether one of a block's 64 keys is none, which a warp is told together.
MLA_DEVICE int any_missing(const void *valid) {
  return __any_sync(~0u, static_cast<const uint16_t *>(valid)[threadIdx.x & 31] != 0x0101);
}
#endif

// Keys of 16 bits

// CHUNKS chunks of a warp's keys, from a byte of them on. own: the key of a lane, modulo KEYS.
template <int KEYS, int CHUNKS, bool LINES = false>
MLA_DEVICE void copy_rows(void *ring, int begin, const void *own, bool own_there, int thread) {
  int lane = thread & 31, unit = lane & 7;
  uint32_t there = of_warp(own_there);
  Shared rows = shared(ring) + (thread >> 5) * KEYS * LINE;
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) {
    // Eight lanes have 128 bytes of a key.
    int key = 4 * i + (lane >> 3);
    const uint8_t *from = of_lane(own, key) + begin + 16 * unit;
    Shared to = rows + key * LINE + ((unit ^ (key & 7)) << 4);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) copy<LINES>(to + c * CHUNK, from + c * LINE, there >> key & 1);
  }
}

// Keys of 8 bits

// Who wants a block: one program, or two of a cluster, whose warps have eight keys each and copy them to the other.
struct Alone {
  static constexpr bool PAIR = false;
  MLA_METHOD int first_row() const { return 0; }
  MLA_METHOD void copy(Shared, Shared, int, int) const {}
};
struct Both {
  static constexpr bool PAIR = true;
  Distance distance;
  Shared barrier;
  // full: what the other program's keys are awaited at, of so many bytes each.
  template <class Barrier> MLA_METHOD Both(Barrier &full, int bytes, int thread) {
    barrier = shared(&full);
    if (thread == 0) expect(barrier, 32 * bytes);
    distance = to_other(barrier);
    barrier += distance;
  }
  MLA_METHOD int first_row() const { return 32 * own_rank(); }
  // A warp's keys, of four chunks of a ring and perhaps of ropes.
  MLA_METHOD void copy(Shared ring, Shared ropes, int chunks, int thread) const {
    written_by_warp();
    int lane = thread & 31, begin = (first_row() + (thread >> 5) * 8) * LINE;
    if (lane < chunks) send((lane == 4 ? ropes : ring + lane * CHUNK) + begin, 8 * LINE, distance, barrier);
  }
};

// A thread's part of a block: 16 elements of each of its keys' chunks, a unit each, of KEYS / 8 keys; those of their left
// half, with ropes of 8 bits, before those of the right one. Of a pair ropes of 16 bits are two units more. SLOTS of them are
// in registers, of this block and then the next; they are a divisor of all.
template <int KEYS, bool RECORDS, bool PAIR> struct Units {
  static constexpr int OWN = KEYS / 8, LEFT = !RECORDS ? 5 : PAIR ? 6 : 4, RIGHT = 4, COUNT = OWN * (LEFT + RIGHT);
};

// The keys of a thread, by its eighth of a warp: one is looked at at a time, as registers are few. What is read of one
// that is none is of another, and not used.
struct Keys {
  const void *own;
  uint32_t all;
  int first, at;
  const uint8_t *row;
  MLA_METHOD Keys(const void *own, bool own_there, int thread)
      : own(own), all(of_warp(own_there)), first((thread & 31) >> 2), at(-1) {}
  MLA_METHOD const uint8_t *key(int i) {
    if (at != i) at = i, row = of_lane(own, first + 8 * i);
    return row;
  }
};

// held: of each slot four words, in flight or at hand.
template <int KEYS, bool RECORDS, bool PAIR, int SLOTS>
MLA_DEVICE void load_unit(uint32_t *held, int unit, Keys &keys, int thread) {
  using U = Units<KEYS, RECORDS, PAIR>;
  constexpr int BEFORE = U::OWN * U::LEFT;
  bool right = unit >= BEFORE;
  int chunks = right ? U::RIGHT : U::LEFT, i = right ? (unit - BEFORE) / chunks : unit / chunks;
  int chunk = right ? (unit - BEFORE) % chunks : unit % chunks;
  int begin = chunk >= 4 ? (RECORDS ? ROPES : LATENT) + 64 * (chunk - 4) : right * LATENT / 2 + 64 * chunk;
  load(held + unit % SLOTS * 4, keys.key(i) + begin + 16 * (thread & 3));
}

// Of each key a scale: a quarter of a key's lanes have its four.
template <int KEYS, bool RECORDS> MLA_DEVICE void load_scales(float *scales, Keys &keys, int thread) {
  if (!RECORDS) return;
#pragma unroll
  for (int i = 0; i < KEYS / 8; i++) load(scales[i], keys.key(i) + SCALES + 4 * (thread & 3));
}

// A chunk of a thread's first or second key.
MLA_DEVICE Shared target(Shared latents, Shared ropes, int i, int chunk) {
  return (chunk == 4 ? ropes : latents + chunk * CHUNK) + 8 * i * LINE;
}

// A half of the keys to a ring's chunks, and to that of ropes. What comes next takes the place of each unit.
template <int KEYS, bool RECORDS, bool RIGHT, bool BF16, int SLOTS, class Readers, class Next>
MLA_DEVICE void widen_half(
    uint32_t *held, const float *scales, void *ring, void *ropes, uint32_t all, int thread, Readers readers, Next next) {
  using U = Units<KEYS, RECORDS, Readers::PAIR>;
  constexpr int CHUNKS = RIGHT ? U::RIGHT : U::LEFT;
  int lane = thread & 31, first = lane >> 2;
  int row = (readers.first_row() + (thread >> 5) * KEYS + first) * LINE;
  // Of 16 elements in 32 bytes the first 8, and the others.
  int place = row + (((lane & 3) * 2 ^ first) << 4);
  const Shared latents[2] = {shared(ring) + place, shared(ring) + (place ^ 16)};
  const Shared of_ropes[2] = {shared(ropes) + place, shared(ropes) + (place ^ 16)};
#pragma unroll
  for (int i = 0; i < U::OWN; i++) {
    bool there = all >> (first + 8 * i) & 1;
    // Of a pair there is no second store of a key that is none.
    uint32_t kept = there || !Readers::PAIR ? ~0u : 0;
    float scale = 1.f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      int unit = U::OWN * U::LEFT * RIGHT + i * CHUNKS + c;
      uint32_t *raw = held + unit % SLOTS * 4;
      if (RECORDS && c >= 4) {
        Shared to = shared(ropes) + row + (((lane & 3) + 4 * (c - 4) ^ first) << 4);
        store(to, raw[0] & kept, raw[1] & kept, raw[2] & kept, raw[3] & kept);
        next(unit);
        continue;
      }
      // Two chunks have a scale, which one of the key's lanes knows.
      if (RECORDS && c % 2 == 0) {
        scale = of_lane(scales[i], (lane & 28) + 2 * RIGHT + c / 2);
        if (!kept) scale = 0.f;
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 2; k++) widen(raw[2 * j + k] & kept, x[2 * k], x[2 * k + 1]);
        if (BF16) {
#pragma unroll
          for (int k = 0; k < 4; k++) x[k] = scaled(x[k], scale);
        }
        store(target(latents[j], of_ropes[j], i, c), x[0], x[1], x[2], x[3]);
      }
      next(unit);
    }
    // Seldom.
    if (!Readers::PAIR && !there) {
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < 2; j++) store(target(latents[j], of_ropes[j], i, c), 0, 0, 0, 0);
    }
  }
  readers.copy(shared(ring), shared(ropes), RIGHT ? 4 : 5, thread);
}

// A lane's key to L2.
template <int KEYS, bool RECORDS> MLA_DEVICE void fetch_key(const void *own, bool own_there, int thread) {
  if (own_there && (thread & 31) < KEYS) fetch(own, RECORDS ? 656 : 576);
}

// The first units of a work item's first block.
template <int KEYS, bool RECORDS, bool PAIR, int SLOTS>
MLA_DEVICE void begin_keys(uint32_t *held, float *scales, const void *own, bool own_there, int thread) {
  Keys keys(own, own_there, thread);
  load_scales<KEYS, RECORDS>(scales, keys, thread);
#pragma unroll
  for (int unit = 0; unit < SLOTS; unit++) load_unit<KEYS, RECORDS, PAIR, SLOTS>(held, unit, keys, thread);
}

// What takes the place of a unit.
template <int KEYS, bool RECORDS, bool PAIR, int SLOTS>
MLA_DEVICE void load_behind(uint32_t *held, int unit, Keys &keys, Keys &after, int thread) {
  constexpr int COUNT = Units<KEYS, RECORDS, PAIR>::COUNT;
  static_assert(COUNT % SLOTS == 0);
  if (unit + SLOTS < COUNT)
    load_unit<KEYS, RECORDS, PAIR, SLOTS>(held, unit + SLOTS, keys, thread);
  else
    load_unit<KEYS, RECORDS, PAIR, SLOTS>(held, unit + SLOTS - COUNT, after, thread);
}

// Left half and ropes.
template <int KEYS, bool RECORDS, bool BF16, int SLOTS, class Readers>
MLA_DEVICE void widen_left_for(
    uint32_t *held, float *scales, void *ring, void *ropes, const void *own, bool own_there, const void *next,
    bool next_there, int thread, Readers readers) {
  Keys keys(own, own_there, thread), after(next, next_there, thread);
  if (RECORDS && !Readers::PAIR) copy_rows<KEYS, 1>(ropes, ROPES, own, own_there, thread);
  widen_half<KEYS, RECORDS, false, BF16, SLOTS>(held, scales, ring, ropes, keys.all, thread, readers, [&](int unit) {
    load_behind<KEYS, RECORDS, Readers::PAIR, SLOTS>(held, unit, keys, after, thread);
  });
}

// The right half, and what is left of the next block's first units.
template <int KEYS, bool RECORDS, bool BF16, int SLOTS, class Readers>
MLA_DEVICE void widen_right_for(
    uint32_t *held, float *scales, void *ring, const void *own, bool own_there, const void *next, bool next_there,
    int thread, Readers readers) {
  Keys keys(own, own_there, thread), after(next, next_there, thread);
  widen_half<KEYS, RECORDS, true, BF16, SLOTS>(held, scales, ring, ring, keys.all, thread, readers, [&](int unit) {
    load_behind<KEYS, RECORDS, Readers::PAIR, SLOTS>(held, unit, keys, after, thread);
  });
  load_scales<KEYS, RECORDS>(scales, after, thread);
}

template <int KEYS, bool RECORDS, bool BF16, int SLOTS>
MLA_DEVICE void widen_left(
    uint32_t *held, float *scales, void *ring, void *ropes, const void *own, bool own_there, const void *next,
    bool next_there, int thread) {
  widen_left_for<KEYS, RECORDS, BF16, SLOTS>(
      held, scales, ring, ropes, own, own_there, next, next_there, thread, Alone());
}
template <int KEYS, bool RECORDS, bool BF16, int SLOTS>
MLA_DEVICE void widen_right(
    uint32_t *held, float *scales, void *ring, const void *own, bool own_there, const void *next, bool next_there,
    int thread) {
  widen_right_for<KEYS, RECORDS, BF16, SLOTS>(held, scales, ring, own, own_there, next, next_there, thread, Alone());
}

// The same for both programs of a cluster; full: of the stage.
template <int KEYS, bool RECORDS, bool BF16, int SLOTS, class Barrier>
MLA_DEVICE void widen_left(
    uint32_t *held, float *scales, void *ring, void *ropes, const void *own, bool own_there, const void *next,
    bool next_there, int thread, Barrier &full) {
  widen_left_for<KEYS, RECORDS, BF16, SLOTS>(
      held, scales, ring, ropes, own, own_there, next, next_there, thread, Both(full, 5 * LINE, thread));
}
template <int KEYS, bool RECORDS, bool BF16, int SLOTS, class Barrier>
MLA_DEVICE void widen_right(
    uint32_t *held, float *scales, void *ring, const void *own, bool own_there, const void *next, bool next_there,
    int thread, Barrier &full) {
  widen_right_for<KEYS, RECORDS, BF16, SLOTS>(
      held, scales, ring, own, own_there, next, next_there, thread, Both(full, 4 * LINE, thread));
}

// Partial results

// A thread's accumulators, one by one, to an array of its own.
MLA_DEVICE void keep(float *own, int i, float x) { own[i] = x; }

// own: of 64 rows to a warpgroup, of COLUMNS each. rows: how many there are. Of eight columns a thread has two: neighbours
// give each other two of one of two eights, and store four, so that a warp's store has 64 bytes of each of its rows.
template <int COLUMNS> MLA_DEVICE void store_part(const float *own, void *out, int64_t stride, int rows, int thread) {
  int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
  bool odd = lane & 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float *to = static_cast<float *>(out) + (row + 8 * half) * stride + odd * 8 + (lane & 2) * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++) {
      const float *x = own + 8 * i + 2 * half;
      float a = of_lane(odd ? x[0] : x[4], lane ^ 1), b = of_lane(odd ? x[1] : x[5], lane ^ 1);
      store_four(to + 16 * i, row + 8 * half < rows, odd ? a : x[0], odd ? b : x[1], odd ? x[4] : a, odd ? x[5] : b);
    }
  }
}

}  // namespace mla::rows

#endif
