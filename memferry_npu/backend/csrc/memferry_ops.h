/* The C ABI of MemFerry kernels, version MF_ABI_VERSION.
 *
 * One header for plain C++ (host_ops.cpp, the reference), CUDA and Ascend C.
 * Loaded with ctypes; memferry_npu/backend/abi.py mirrors every struct, and a
 * test compares both through mf_layout(). docs/arithmetic.md defines results.
 *
 * Rules for every op:
 *  - args and ctx start with struct_bytes = sizeof(struct) and abi_version; an
 *    op refuses anything else with MF_EABI. `reserved` fields must be 0.
 *  - All checks come first. On an error nothing was read or written and
 *    mf_last_error() has one sentence for the calling thread.
 *  - Sizes are in elements unless named *_bytes; 0 elements is a no-op for
 *    which pointers may be null. Pointers are aligned to their element.
 *  - Buffers of one call must not overlap unless an op says so.
 *  - Device ops are asynchronous on ctx->stream, allocate nothing, never
 *    synchronise, and leave the current device as it was. They take scratch
 *    memory from ctx->workspace: mf_<op>_workspace() says how many bytes.
 *    In host_ops.cpp, an mf_dptr is a CPU address, ops complete before they
 *    return, workspace is 0, and ctx->max_cores is the number of threads.
 */
#ifndef MEMFERRY_OPS_H
#define MEMFERRY_OPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MF_ABI_VERSION 1u
#define MF_CHUNK 65536u /* elements per partial sum of squares */

typedef uint64_t mf_dptr; /* valid for kernels on ctx->device: local, mapped host or peer */
typedef void *mf_hptr;    /* CPU address */

enum mf_dtype { MF_NONE = 0, MF_F32 = 1, MF_BF16 = 2, MF_F16 = 3, MF_I32 = 4, MF_I64 = 5 };

enum mf_error {
  MF_OK = 0,
  MF_EABI = 1,         /* struct_bytes or abi_version differ from this library's */
  MF_EINVAL = 2,       /* null or misaligned pointer, bad size, overlap, bad combination */
  MF_EDTYPE = 3,       /* dtype unknown or not supported by the op */
  MF_EWORKSPACE = 4,   /* workspace missing or too small */
  MF_ENOMEM = 5,       /* host memory ran out (host ops only) */
  MF_EUNSUPPORTED = 6, /* this library has no such op */
  MF_EDEVICE = 7       /* the device runtime refused the launch */
};

enum mf_op_bit { /* bits of mf_info.ops */
  MF_OP_COPY = 1, MF_OP_LINEAR_SMALL = 2, MF_OP_EMBEDDING = 4, MF_OP_GRAD_STATS = 8,
  MF_OP_GRAD_WRITE = 16, MF_OP_ADAMW = 32, MF_OP_ADAMW_HOST = 64, MF_OP_MASTER_HOST = 128
};

enum mf_master_mode { MF_MASTER_ROUND = 1, MF_MASTER_SPLIT = 2, MF_MASTER_JOIN = 3 };

typedef struct {
  uint32_t struct_bytes, abi_version;
  int32_t device;     /* ordinal of the library's own runtime; -1 for the CPU */
  uint32_t max_cores; /* most device cores (SMs, AI cores) or threads; 0: the library chooses */
  void *stream;       /* owned by the backend; null on the CPU */
  mf_dptr workspace;  /* owned by the caller */
  uint64_t workspace_bytes;
} mf_ctx;

typedef struct {
  uint32_t struct_bytes, abi_version;
  uint32_t ops;    /* mf_op_bit */
  uint32_t has_fma; /* 1: fused multiply-add is one instruction here */
  char backend[16], simd[48], compiler[80]; /* zero-terminated */
} mf_info;

/* dst[0:bytes] = src[0:bytes], any alignment. */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr dst, src;
  uint64_t bytes;
} mf_copy_args;

/* y[m,n] = x[m,k] w[n,k]^T + bias[n]; row-major, contiguous, one dtype (F32, BF16, F16).
 * fp32 accumulation in a fixed order: 16 lanes, lane j takes k = j, j + 16, ... with one
 * fma each, then lanes are added j += j + h for h = 8, 4, 2, 1; bias is added in fp32; the
 * result is rounded to nearest even; NaN is 0x7FC00000, 0x7FC0 or 0x7E00. (CUDA and
 * Ascend C: within rounding of this.) */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr x, w, bias /* 0: none */, y;
  uint64_t m, n, k;
  int32_t dtype;
  uint32_t reserved;
} mf_linear_small_args;

/* out[i,:] = table[indices[i],:]. An index outside [0, rows): the CPU refuses the call with
 * MF_EINVAL; a device, which cannot report it, fills the row with NaN. */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr indices, table, out;
  uint64_t count, rows, dim;
  int32_t index_dtype; /* I32 or I64 */
  int32_t dtype;       /* F32, BF16, F16: copied, not computed on */
} mf_embedding_args;

/* chunk_sums[c] = sum of squares of chunk c (fp32[ceil(n / MF_CHUNK)], overwritten);
 * *nonfinite is set to 1 if an element is infinite or NaN and otherwise left as it is. */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr grad, chunk_sums, nonfinite /* uint32_t */;
  uint64_t n;
  int32_t grad_dtype; /* F32 or BF16 */
  uint32_t reserved;
} mf_grad_stats_args;

/* accumulate 0: dst = grad (same dtype, or F32 from BF16). accumulate 1: dst (F32) += grad.
 * The statistics are those of the value written. dst may be grad itself (same dtype). */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr grad, dst, chunk_sums, nonfinite;
  uint64_t n;
  int32_t grad_dtype, dst_dtype;
  uint32_t accumulate, reserved;
} mf_grad_write_args;

/* Values as in arithmetic.AdamwScalars. */
typedef struct {
  float decay, one_minus_beta1, one_minus_beta2, beta2, step_size, sqrt_bc2, eps;
  float coef; /* clip coefficient */
} mf_adamw_scalars;

/* One AdamW step in place. Three layouts of the parameter, by which pointers are given:
 *   master                  fp32 parameter
 *   master, working         fp32 master and its bf16 working copy (written, not read)
 *   working, low            split master: bf16 hi and int16 low */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_dptr grad, exp_avg, exp_avg_sq, master, working, low;
  mf_dptr coef_ptr; /* fp32 on the device, read instead of scalars.coef; 0: not used */
  uint64_t n;
  int32_t grad_dtype; /* F32 or BF16 */
  uint32_t reserved;
  mf_adamw_scalars scalars;
} mf_adamw_args;

/* The same on CPU memory, on `threads` threads (0: one per available core). */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_hptr grad, exp_avg, exp_avg_sq, master, working, low;
  uint64_t n;
  int32_t grad_dtype;
  uint32_t threads;
  mf_adamw_scalars scalars;
} mf_adamw_host_args;

/* ROUND: working = bf16(master). SPLIT: (working, low) = master. JOIN: master = (working, low). */
typedef struct {
  uint32_t struct_bytes, abi_version;
  mf_hptr master, working, low;
  uint64_t n;
  int32_t mode; /* mf_master_mode */
  uint32_t threads;
} mf_master_host_args;

/* One row per field, for the contract test; the struct's own size has field "". */
typedef struct {
  const char *structure, *field;
  uint64_t offset, bytes;
} mf_layout_row;

const char *mf_last_error(void);
int mf_query(mf_info *info); /* the caller sets struct_bytes and abi_version */
const mf_layout_row *mf_layout(uint32_t *rows);

#define MF_DECLARE(op)                                                               \
  int mf_##op##_workspace(const mf_##op##_args *args, const mf_ctx *ctx, uint64_t *bytes); \
  int mf_##op(const mf_ctx *ctx, const mf_##op##_args *args)

MF_DECLARE(copy);
MF_DECLARE(linear_small);
MF_DECLARE(embedding);
MF_DECLARE(grad_stats);
MF_DECLARE(grad_write);
MF_DECLARE(adamw);
MF_DECLARE(adamw_host);
MF_DECLARE(master_host);
#undef MF_DECLARE

#ifdef __cplusplus
}
#endif
#endif
