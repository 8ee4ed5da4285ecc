// CUDA's vectors of words, and the bits of floats, on a CPU. Behind numbers.h.

#pragma once

#include <cstdint>

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint32_t __float_as_uint(float x) { return bits<uint32_t>(x); }
static float __uint_as_float(uint32_t x) { return bits<float>(x); }
