// The C ABI of memferry_ops.h on the CPU: argument checks, then blocks on the pool.
// The reference for the CUDA and Ascend C libraries.
#include <cstdarg>
#include <cstdio>
#include <new>
#include <type_traits>

#include "host_kernels.h"
#include "host_pool.h"

using namespace mf;

namespace {

thread_local char last_error[256] = "";

__attribute__((format(printf, 2, 3))) int fail(int code, const char *format, ...) {
  va_list list;
  va_start(list, format);
  std::vsnprintf(last_error, sizeof last_error, format, list);
  va_end(list);
  return code;
}

#define CHECK(call)                  \
  do {                               \
    if (int code = (call)) return code; \
  } while (0)

template <class S>
int check_struct(const S *s, const char *op, const char *what) {
  if (!s) return fail(MF_EINVAL, "%s: %s is null", op, what);
  if (s->struct_bytes != sizeof(S))
    return fail(MF_EABI, "%s: %s.struct_bytes is %u, this library's is %zu", op, what, s->struct_bytes, sizeof(S));
  if (s->abi_version != MF_ABI_VERSION)
    return fail(MF_EABI, "%s: %s.abi_version is %u, this library's is %u", op, what, s->abi_version, MF_ABI_VERSION);
  return MF_OK;
}

size_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case MF_F32: case MF_I32: return 4;
    case MF_BF16: case MF_F16: return 2;
    case MF_I64: return 8;
    default: return 0;
  }
}

int check_dtype(const char *op, const char *field, int32_t dtype, std::initializer_list<int32_t> allowed) {
  for (int32_t one : allowed)
    if (dtype == one) return MF_OK;
  return fail(MF_EDTYPE, "%s: %s is %d, which this op does not support", op, field, dtype);
}

// A buffer of a call. `bytes` is the element size, which is also the alignment asked for.
struct Buffer {
  const char *name;
  uint64_t address, count, bytes;
  bool written;
};

int check_buffers(const char *op, std::initializer_list<Buffer> buffers) {
  for (const Buffer &b : buffers) {
    if (!b.count) continue;
    if (!b.address) return fail(MF_EINVAL, "%s: %s is null", op, b.name);
    if (b.address % b.bytes)
      return fail(MF_EINVAL, "%s: %s is not aligned to its element of %d bytes", op, b.name, int(b.bytes));
    // Twice the size fits 63 bits, so no later sum or product of sizes wraps.
    if (b.count > (uint64_t(1) << 62) / b.bytes || b.address > UINT64_MAX - b.count * b.bytes)
      return fail(MF_EINVAL, "%s: %s is too large", op, b.name);
  }
  for (const Buffer &a : buffers)
    for (const Buffer &b : buffers)
      if (a.written && &a != &b && a.count && b.count && a.address < b.address + b.count * b.bytes &&
          b.address < a.address + a.count * a.bytes)
        return fail(MF_EINVAL, "%s: %s and %s overlap", op, a.name, b.name);
  return MF_OK;
}

int check_reserved(const char *op, uint32_t reserved) {
  return reserved ? fail(MF_EINVAL, "%s: reserved is not 0", op) : MF_OK;
}

template <class T>
T *at(mf_dptr address) {
  return reinterpret_cast<T *>(static_cast<uintptr_t>(address));
}
uint64_t address_of(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Small enough to spread over the threads, large enough that a block outweighs handing it out.
size_t block_for(uint64_t n, unsigned threads) {
  const uint64_t even = (n / (uint64_t(threads ? threads : Pool::available_cores()) * 4) + 4096) & ~uint64_t(4095);
  return size_t(std::min<uint64_t>(even, 65536));
}

int check(const mf_copy_args *a) {
  CHECK(check_struct(a, "mf_copy", "args"));
  return check_buffers("mf_copy", {{"dst", a->dst, a->bytes, 1, true}, {"src", a->src, a->bytes, 1, false}});
}

int product(const char *op, uint64_t a, uint64_t b, uint64_t *out) {
  if (__builtin_mul_overflow(a, b, out) || *out > (uint64_t(1) << 60)) return fail(MF_EINVAL, "%s: sizes are too large", op);
  return MF_OK;
}

int check(const mf_linear_small_args *a) {
  const char *op = "mf_linear_small";
  CHECK(check_struct(a, op, "args"));
  CHECK(check_reserved(op, a->reserved));
  CHECK(check_dtype(op, "dtype", a->dtype, {MF_F32, MF_BF16, MF_F16}));
  uint64_t mk, nk, mn;
  CHECK(product(op, a->m, a->k, &mk));
  CHECK(product(op, a->n, a->k, &nk));
  CHECK(product(op, a->m, a->n, &mn));
  const uint64_t size = dtype_bytes(a->dtype);
  if (!mn) mk = nk = 0;
  return check_buffers(op, {{"x", a->x, mk, size, false},
                            {"w", a->w, nk, size, false},
                            {"bias", a->bias, a->bias && mn ? a->n : 0, size, false},
                            {"y", a->y, mn, size, true}});
}

int check(const mf_embedding_args *a) {
  const char *op = "mf_embedding";
  CHECK(check_struct(a, op, "args"));
  CHECK(check_dtype(op, "dtype", a->dtype, {MF_F32, MF_BF16, MF_F16}));
  CHECK(check_dtype(op, "index_dtype", a->index_dtype, {MF_I32, MF_I64}));
  uint64_t table, out;
  CHECK(product(op, a->rows, a->dim, &table));
  CHECK(product(op, a->count, a->dim, &out));
  const uint64_t size = dtype_bytes(a->dtype);
  CHECK(check_buffers(op, {{"indices", a->indices, a->count, dtype_bytes(a->index_dtype), false},
                           {"table", a->table, out ? table : 0, size, false},
                           {"out", a->out, out, size, true}}));
  for (uint64_t i = 0; i < a->count; ++i) {
    const int64_t index = a->index_dtype == MF_I64 ? at<int64_t>(a->indices)[i] : at<int32_t>(a->indices)[i];
    if (index < 0 || uint64_t(index) >= a->rows)
      return fail(MF_EINVAL, "%s: indices[%llu] is %lld, outside [0, %llu)", op, (unsigned long long)i,
                  (long long)index, (unsigned long long)a->rows);
  }
  return MF_OK;
}

// The output of the statistics: always one uint32_t, and an fp32 per chunk.
int check(const mf_grad_stats_args *a) {
  const char *op = "mf_grad_stats";
  CHECK(check_struct(a, op, "args"));
  CHECK(check_reserved(op, a->reserved));
  CHECK(check_dtype(op, "grad_dtype", a->grad_dtype, {MF_F32, MF_BF16}));
  const uint64_t chunks = a->n / MF_CHUNK + (a->n % MF_CHUNK != 0);
  return check_buffers(op, {{"grad", a->grad, a->n, dtype_bytes(a->grad_dtype), false},
                            {"chunk_sums", a->chunk_sums, chunks, 4, true},
                            {"nonfinite", a->nonfinite, a->n ? 1u : 0u, 4, true}});
}

int check(const mf_grad_write_args *a) {
  const char *op = "mf_grad_write";
  CHECK(check_struct(a, op, "args"));
  CHECK(check_reserved(op, a->reserved));
  CHECK(check_dtype(op, "grad_dtype", a->grad_dtype, {MF_F32, MF_BF16}));
  CHECK(check_dtype(op, "dst_dtype", a->dst_dtype, {MF_F32, MF_BF16}));
  if (a->accumulate > 1) return fail(MF_EINVAL, "%s: accumulate is %u, not 0 or 1", op, a->accumulate);
  if (a->accumulate && a->dst_dtype != MF_F32) return fail(MF_EDTYPE, "%s: accumulate needs an F32 dst", op);
  if (a->dst_dtype == MF_BF16 && a->grad_dtype != MF_BF16)
    return fail(MF_EDTYPE, "%s: an F32 grad would be rounded by a BF16 dst", op);
  const uint64_t chunks = a->n / MF_CHUNK + (a->n % MF_CHUNK != 0);
  const bool same = a->dst == a->grad && a->dst_dtype == a->grad_dtype;
  return check_buffers(op, {{"grad", a->grad, same ? 0 : a->n, dtype_bytes(a->grad_dtype), false},
                            {"dst", a->dst, a->n, dtype_bytes(a->dst_dtype), true},
                            {"chunk_sums", a->chunk_sums, chunks, 4, true},
                            {"nonfinite", a->nonfinite, a->n ? 1u : 0u, 4, true}});
}

int check_adamw(const char *op, int32_t grad_dtype, uint64_t n, const AdamwPointers &p) {
  CHECK(check_dtype(op, "grad_dtype", grad_dtype, {MF_F32, MF_BF16}));
  if (!n) return MF_OK;
  if (p.low ? (p.master || !p.working) : !p.master)
    return fail(MF_EINVAL, "%s: give master, or master and working, or working and low", op);
  return check_buffers(op, {{"grad", address_of(p.grad), n, dtype_bytes(grad_dtype), false},
                            {"exp_avg", address_of(p.exp_avg), n, 4, true},
                            {"exp_avg_sq", address_of(p.exp_avg_sq), n, 4, true},
                            {"master", address_of(p.master), p.master ? n : 0, 4, true},
                            {"working", address_of(p.working), p.working ? n : 0, 2, true},
                            {"low", address_of(p.low), p.low ? n : 0, 2, true}});
}

AdamwPointers pointers(const mf_adamw_args &a) {
  return {at<void>(a.grad),    at<float>(a.exp_avg),    at<float>(a.exp_avg_sq),
          at<float>(a.master), at<uint16_t>(a.working), at<int16_t>(a.low)};
}
AdamwPointers pointers(const mf_adamw_host_args &a) {
  return {a.grad,
          static_cast<float *>(a.exp_avg),
          static_cast<float *>(a.exp_avg_sq),
          static_cast<float *>(a.master),
          static_cast<uint16_t *>(a.working),
          static_cast<int16_t *>(a.low)};
}

int check(const mf_adamw_args *a) {
  CHECK(check_struct(a, "mf_adamw", "args"));
  CHECK(check_reserved("mf_adamw", a->reserved));
  CHECK(check_buffers("mf_adamw", {{"coef_ptr", a->coef_ptr, a->coef_ptr ? 1u : 0u, 4, false}}));
  return check_adamw("mf_adamw", a->grad_dtype, a->n, pointers(*a));
}

int check(const mf_adamw_host_args *a) {
  CHECK(check_struct(a, "mf_adamw_host", "args"));
  return check_adamw("mf_adamw_host", a->grad_dtype, a->n, pointers(*a));
}

int check(const mf_master_host_args *a) {
  const char *op = "mf_master_host";
  CHECK(check_struct(a, op, "args"));
  if (a->mode < MF_MASTER_ROUND || a->mode > MF_MASTER_JOIN) return fail(MF_EINVAL, "%s: mode is %d", op, a->mode);
  const bool joins = a->mode == MF_MASTER_JOIN;
  return check_buffers(op, {{"master", address_of(a->master), a->n, 4, joins},
                            {"working", address_of(a->working), a->n, 2, !joins},
                            {"low", address_of(a->low), a->mode == MF_MASTER_ROUND ? 0 : a->n, 2, !joins}});
}

void run_adamw(const AdamwPointers &p, int32_t grad_dtype, uint64_t n, unsigned threads, const mf_adamw_scalars &s) {
  const Layout layout = p.low ? kSplit : p.working ? kMasterWorking : kMaster;
  using Block = void (*)(const AdamwPointers &, const mf_adamw_scalars &, size_t, size_t);
  static constexpr Block kBlocks[2][3] = {
      {adamw_block<float, kMaster>, adamw_block<float, kMasterWorking>, adamw_block<float, kSplit>},
      {adamw_block<Bf16, kMaster>, adamw_block<Bf16, kMasterWorking>, adamw_block<Bf16, kSplit>}};
  const Block block = kBlocks[grad_dtype == MF_BF16][layout];
  parallel_blocks(n, block_for(n, threads), threads, [&](size_t begin, size_t end) { block(p, s, begin, end); });
}

// Writes each chunk with write(begin, count), then sums what was written while it is in cache.
template <class T, class Write>
void run_stats(const T *x, uint64_t n, unsigned threads, float *sums, uint32_t *nonfinite, Write &&write) {
  std::atomic<uint32_t> found{0};
  parallel_blocks(n, MF_CHUNK, threads, [&](size_t begin, size_t end) {
    static thread_local float scratch[MF_CHUNK];
    uint32_t bad = 0;
    write(begin, end - begin);
    sums[begin / MF_CHUNK] = chunk_sum(x + begin, end - begin, scratch, &bad);
    if (bad) found.store(1, std::memory_order_relaxed);
  });
  if (found.load(std::memory_order_relaxed)) *nonfinite = 1;
}

template <class T>
void run_linear(const mf_linear_small_args &a, unsigned threads) {
  const T *x = at<T>(a.x), *w = at<T>(a.w), *bias = at<T>(a.bias);
  T *y = at<T>(a.y);
  // A row of w serves every row of x while it is in cache.
  parallel_blocks(a.n, 8, threads, [&](size_t begin, size_t end) {
    for (size_t j = begin; j < end; ++j)
      for (size_t i = 0; i < a.m; ++i) {
        float value = dot(x + i * a.k, w + j * a.k, a.k);
        if (bias) value = value + to_float(bias[j]);
        from_float(value, y + i * a.n + j);
      }
  });
}

int execute(const mf_ctx &ctx, const mf_copy_args &a) {
  constexpr size_t kPiece = size_t(1) << 20;
  parallel_blocks(a.bytes, kPiece, ctx.max_cores, [&](size_t begin, size_t end) {
    std::memcpy(at<char>(a.dst) + begin, at<char>(a.src) + begin, end - begin);
  });
  return MF_OK;
}

int execute(const mf_ctx &ctx, const mf_linear_small_args &a) {
  if (!a.m || !a.n) return MF_OK;
  if (a.dtype == MF_F32) run_linear<float>(a, ctx.max_cores);
  else if (a.dtype == MF_BF16) run_linear<Bf16>(a, ctx.max_cores);
  else run_linear<F16>(a, ctx.max_cores);
  return MF_OK;
}

int execute(const mf_ctx &ctx, const mf_embedding_args &a) {
  const size_t row = a.dim * dtype_bytes(a.dtype);
  if (!row) return MF_OK;
  parallel_blocks(a.count, 256, ctx.max_cores, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const int64_t index = a.index_dtype == MF_I64 ? at<int64_t>(a.indices)[i] : at<int32_t>(a.indices)[i];
      std::memcpy(at<char>(a.out) + i * row, at<char>(a.table) + size_t(index) * row, row);
    }
  });
  return MF_OK;
}

int execute(const mf_ctx &ctx, const mf_grad_stats_args &a) {
  auto nothing = [](size_t, size_t) {};
  float *sums = at<float>(a.chunk_sums);
  uint32_t *nonfinite = at<uint32_t>(a.nonfinite);
  if (a.grad_dtype == MF_F32) run_stats(at<float>(a.grad), a.n, ctx.max_cores, sums, nonfinite, nothing);
  else run_stats(at<Bf16>(a.grad), a.n, ctx.max_cores, sums, nonfinite, nothing);
  return MF_OK;
}

template <class G, class D>
void run_write(const mf_ctx &ctx, const mf_grad_write_args &a) {
  const G *grad = at<G>(a.grad);
  D *dst = at<D>(a.dst);
  run_stats(dst, a.n, ctx.max_cores, at<float>(a.chunk_sums), at<uint32_t>(a.nonfinite),
            [&](size_t begin, size_t count) {
              if constexpr (std::is_same_v<D, float>) {
                if (a.accumulate) return accumulate_block(grad + begin, dst + begin, count);
              }
              if constexpr (std::is_same_v<G, D>) {
                if (a.grad != a.dst) std::memcpy(dst + begin, grad + begin, count * sizeof(D));
              } else {
                widen_block(grad + begin, dst + begin, count);
              }
            });
}

int execute(const mf_ctx &ctx, const mf_grad_write_args &a) {
  if (a.grad_dtype == MF_F32) run_write<float, float>(ctx, a);
  else if (a.dst_dtype == MF_F32) run_write<Bf16, float>(ctx, a);
  else run_write<Bf16, Bf16>(ctx, a);
  return MF_OK;
}

int execute(const mf_ctx &ctx, const mf_adamw_args &a) {
  mf_adamw_scalars scalars = a.scalars;
  if (a.coef_ptr) scalars.coef = *at<float>(a.coef_ptr);
  run_adamw(pointers(a), a.grad_dtype, a.n, ctx.max_cores, scalars);
  return MF_OK;
}

int execute(const mf_ctx &, const mf_adamw_host_args &a) {
  run_adamw(pointers(a), a.grad_dtype, a.n, a.threads, a.scalars);
  return MF_OK;
}

int execute(const mf_ctx &, const mf_master_host_args &a) {
  float *master = static_cast<float *>(a.master);
  uint16_t *hi = static_cast<uint16_t *>(a.working);
  int16_t *low = static_cast<int16_t *>(a.low);
  parallel_blocks(a.n, block_for(a.n, a.threads), a.threads, [&](size_t begin, size_t end) {
    const size_t n = end - begin;
    if (a.mode == MF_MASTER_ROUND) round_block(master + begin, hi + begin, n);
    else if (a.mode == MF_MASTER_SPLIT) split_block(master + begin, hi + begin, low + begin, n);
    else join_block(hi + begin, low + begin, master + begin, n);
  });
  return MF_OK;
}

template <class Args>
int workspace(const char *op, const Args *args, const mf_ctx *ctx, uint64_t *bytes) {
  if (!bytes) return fail(MF_EINVAL, "%s: bytes is null", op);
  CHECK(check_struct(ctx, op, "ctx"));
  CHECK(check_struct(args, op, "args"));
  *bytes = 0;
  return MF_OK;
}

template <class Args>
int dispatch(const char *op, const mf_ctx *ctx, const Args *args) {
  try {
    CHECK(check_struct(ctx, op, "ctx"));
    if (ctx->device != -1) return fail(MF_EINVAL, "%s: ctx.device is %d; the CPU is -1", op, ctx->device);
    CHECK(check(args));
    return execute(*ctx, *args);
  } catch (const std::bad_alloc &) {
    return fail(MF_ENOMEM, "%s: host memory ran out", op);
  }
}

}  // namespace

extern "C" {

#define MF_DEFINE(op)                                                                        \
  int mf_##op##_workspace(const mf_##op##_args *args, const mf_ctx *ctx, uint64_t *bytes) { \
    return workspace("mf_" #op, args, ctx, bytes);                                           \
  }                                                                                          \
  int mf_##op(const mf_ctx *ctx, const mf_##op##_args *args) { return dispatch("mf_" #op, ctx, args); }

MF_DEFINE(copy)
MF_DEFINE(linear_small)
MF_DEFINE(embedding)
MF_DEFINE(grad_stats)
MF_DEFINE(grad_write)
MF_DEFINE(adamw)
MF_DEFINE(adamw_host)
MF_DEFINE(master_host)

const char *mf_last_error(void) { return last_error; }

int mf_query(mf_info *info) {
  CHECK(check_struct(info, "mf_query", "info"));
  info->ops = MF_OP_COPY | MF_OP_LINEAR_SMALL | MF_OP_EMBEDDING | MF_OP_GRAD_STATS | MF_OP_GRAD_WRITE | MF_OP_ADAMW |
              MF_OP_ADAMW_HOST | MF_OP_MASTER_HOST;
#if defined(__AVX512F__)
  const char *simd = "avx512";
#elif defined(__AVX2__)
  const char *simd = "avx2";
#elif defined(__x86_64__)
  const char *simd = "sse2";
#elif defined(__ARM_FEATURE_SVE)
  const char *simd = "sve";
#elif defined(__aarch64__)
  const char *simd = "neon";
#else
  const char *simd = "scalar";
#endif
#if defined(__FMA__) || defined(__aarch64__)
  info->has_fma = 1;
#else
  info->has_fma = 0;
#endif
  std::snprintf(info->backend, sizeof info->backend, "host");
  std::snprintf(info->simd, sizeof info->simd, "%s", simd);
  std::snprintf(info->compiler, sizeof info->compiler, "%s", __VERSION__);
  return MF_OK;
}

}  // extern "C"
