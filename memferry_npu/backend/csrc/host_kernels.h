// The arithmetic of docs/arithmetic.md on raw CPU arrays, one block at a time.
//
// Plain loops that the compiler vectorises; compile with -ffp-contract=off and
// without -ffast-math: the only fused operations are the __builtin_fmaf below.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memferry_ops.h"

namespace mf {

constexpr uint32_t kExponent = 0x7F800000u, kMagnitude = 0x7FFFFFFFu, kNan = 0x7FC00000u;

static inline uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
static inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

static inline float to_float(float x) { return x; }
static inline float to_float(Bf16 x) { return float_of(uint32_t(x.bits) << 16); }
static inline float to_float(F16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7FFFu;
  if (magnitude < 0x400u) {  // zero or subnormal: units of 2^-24
    const float value = float(magnitude) * 0x1p-24f;
    return float_of(bits_of(value) | sign);
  }
  const uint32_t exponent = magnitude >= 0x7C00u ? 0x70000000u : 0x38000000u;
  return float_of(((magnitude << 13) + exponent) | sign);
}

static inline float canonical_nan(float x) {
  const uint32_t b = bits_of(x);
  return float_of((b & kMagnitude) > kExponent ? kNan : b);
}

// fp32 to the type of an activation: nearest, ties to even (what torch does); one form of NaN,
// since its sign differs between processors.
static inline void from_float(float x, float *out) { *out = canonical_nan(x); }
static inline void from_float(float x, Bf16 *out) {
  const uint32_t b = bits_of(x);
  const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  out->bits = uint16_t((b & kMagnitude) > kExponent ? 0x7FC0u : rounded);
}
static inline void from_float(float x, F16 *out) {
  const uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u, magnitude = b & kMagnitude;
  uint32_t result;
  if (magnitude > kExponent) {
    out->bits = 0x7E00u;
    return;
  }
  if (magnitude >= 0x477FF000u) {  // rounds past the largest half
    result = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 rounds to units of 2^-24
    result = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    result = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  }
  out->bits = uint16_t(result | sign);
}

// Exponent field 0 becomes +0; NaN gets its one form.
static inline float store_form(float x) {
  const uint32_t b = bits_of(x);
  const uint32_t kept = (b & kExponent) ? b : 0u;
  return float_of((b & kMagnitude) > kExponent ? kNan : kept);
}

// The working weight of a master without a NaN other than kNan.
static inline uint16_t round_bf16(float master) {
  return uint16_t((bits_of(master) + 0x8000u) >> 16);
}
static inline float join(uint16_t hi, int16_t low) {
  return float_of((uint32_t(hi) << 16) + uint32_t(int32_t(low)));
}

enum Layout { kMaster, kMasterWorking, kSplit };

struct AdamwPointers {
  const void *grad;
  float *exp_avg, *exp_avg_sq, *master;
  uint16_t *working;
  int16_t *low;
};

template <class G, Layout layout>
__attribute__((noinline)) void adamw_block(const AdamwPointers &at, const mf_adamw_scalars &s, size_t begin,
                                           size_t end) {
  const G *__restrict grad = static_cast<const G *>(at.grad) + begin;
  float *__restrict exp_avg = at.exp_avg + begin;
  float *__restrict exp_avg_sq = at.exp_avg_sq + begin;
  float *__restrict master = layout == kSplit ? nullptr : at.master + begin;
  uint16_t *__restrict working = layout == kMaster ? nullptr : at.working + begin;
  int16_t *__restrict low = layout == kSplit ? at.low + begin : nullptr;
  const float decay = s.decay, w1 = s.one_minus_beta1, w2 = s.one_minus_beta2, beta2 = s.beta2;
  const float step = -s.step_size, sqrt_bc2 = s.sqrt_bc2, eps = s.eps, coef = s.coef;
  const size_t n = end - begin;
  for (size_t i = 0; i < n; ++i) {
    const float g = to_float(grad[i]) * coef;  // times 1.0 changes no number
    float p = layout == kSplit ? join(working[i], low[i]) : master[i];
    p = p * decay;
    const float m = store_form(__builtin_fmaf(w1, g - exp_avg[i], exp_avg[i]));
    const float v = store_form(__builtin_fmaf(w2 * g, g, beta2 * exp_avg_sq[i]));
    const float denominator = __builtin_sqrtf(v) / sqrt_bc2 + eps;
    p = canonical_nan(p + (step * m) / denominator);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (layout != kSplit) master[i] = p;
    if (layout != kMaster) working[i] = round_bf16(p);
    if (layout == kSplit) low[i] = int16_t(uint16_t(bits_of(p)));
  }
}

static inline void round_block(const float *__restrict master, uint16_t *__restrict hi, size_t n) {
  for (size_t i = 0; i < n; ++i) hi[i] = round_bf16(canonical_nan(master[i]));
}

static inline void split_block(const float *__restrict master, uint16_t *__restrict hi, int16_t *__restrict low,
                               size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const float p = canonical_nan(master[i]);
    hi[i] = round_bf16(p);
    low[i] = int16_t(uint16_t(bits_of(p)));
  }
}

static inline void join_block(const uint16_t *__restrict hi, const int16_t *__restrict low,
                              float *__restrict master, size_t n) {
  for (size_t i = 0; i < n; ++i) master[i] = join(hi[i], low[i]);
}

// s[i] += s[i + h] for h = count / 2, ..., 1; count is a power of two.
static inline float halve(float *s, size_t count) {
  for (size_t h = count / 2; h; h /= 2) {
    const float *__restrict upper = s + h;
    float *__restrict lower = s;
    for (size_t i = 0; i < h; ++i) lower[i] += upper[i];
  }
  return s[0];
}

// Sum of squares of one chunk of n <= MF_CHUNK elements; `*nonfinite` |= 1 where one is.
// `scratch` holds MF_CHUNK floats.
template <class T>
__attribute__((noinline)) float chunk_sum(const T *__restrict x, size_t n, float *__restrict scratch,
                                          uint32_t *nonfinite) {
  constexpr size_t kRow = MF_CHUNK / 8;
  uint32_t bad = 0;
  float sum;
  if (n == MF_CHUNK) {
    // The tree's first three levels at once, on 8 streams: h = 4, 2, 1 rows.
    for (size_t i = 0; i < kRow; ++i) {
      float s[8];
      for (size_t row = 0; row < 8; ++row) {
        const float value = to_float(x[i + row * kRow]);
        bad |= uint32_t((bits_of(value) & kExponent) == kExponent);
        s[row] = value * value;
      }
      scratch[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
    sum = halve(scratch, kRow);
  } else {
    // Levels above the next power of two would only add +0 to squares: left out.
    size_t count = 1;
    while (count < n) count *= 2;
    for (size_t i = 0; i < n; ++i) {
      const float value = to_float(x[i]);
      bad |= uint32_t((bits_of(value) & kExponent) == kExponent);
      scratch[i] = value * value;
    }
    for (size_t i = n; i < count; ++i) scratch[i] = 0.0f;
    sum = halve(scratch, count);
  }
  *nonfinite |= bad;
  return canonical_nan(sum);
}

template <class T>
void accumulate_block(const T *__restrict grad, float *__restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = canonical_nan(dst[i] + to_float(grad[i]));
}

static inline void widen_block(const Bf16 *__restrict grad, float *__restrict dst, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = to_float(grad[i]);
}

// One output of mf_linear_small: see the order in memferry_ops.h.
template <class T>
float dot(const T *__restrict x, const T *__restrict w, size_t k) {
  constexpr size_t kLanes = 16;
  float lanes[kLanes] = {};
  size_t at = 0;
  for (; at + kLanes <= k; at += kLanes)
    for (size_t j = 0; j < kLanes; ++j) lanes[j] = __builtin_fmaf(to_float(x[at + j]), to_float(w[at + j]), lanes[j]);
  for (size_t j = 0; at + j < k; ++j) lanes[j] = __builtin_fmaf(to_float(x[at + j]), to_float(w[at + j]), lanes[j]);
  return halve(lanes, kLanes);
}

}  // namespace mf
