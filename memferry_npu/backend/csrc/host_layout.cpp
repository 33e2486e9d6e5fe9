// mf_layout(): sizes and offsets of the ABI's structs as this compiler lays them out.
#include <cstddef>

#include "memferry_ops.h"

#define STRUCT(s) {#s, "", 0, sizeof(s)}
#define FIELD(s, f) {#s, #f, offsetof(s, f), sizeof(s::f)}
#define HEAD(s) STRUCT(s), FIELD(s, struct_bytes), FIELD(s, abi_version)

static const mf_layout_row kRows[] = {
    HEAD(mf_ctx), FIELD(mf_ctx, device), FIELD(mf_ctx, max_cores), FIELD(mf_ctx, stream), FIELD(mf_ctx, workspace),
    FIELD(mf_ctx, workspace_bytes),
    HEAD(mf_info), FIELD(mf_info, ops), FIELD(mf_info, has_fma), FIELD(mf_info, backend), FIELD(mf_info, simd),
    FIELD(mf_info, compiler),
    HEAD(mf_copy_args), FIELD(mf_copy_args, dst), FIELD(mf_copy_args, src), FIELD(mf_copy_args, bytes),
    HEAD(mf_linear_small_args), FIELD(mf_linear_small_args, x), FIELD(mf_linear_small_args, w),
    FIELD(mf_linear_small_args, bias), FIELD(mf_linear_small_args, y), FIELD(mf_linear_small_args, m),
    FIELD(mf_linear_small_args, n), FIELD(mf_linear_small_args, k), FIELD(mf_linear_small_args, dtype),
    FIELD(mf_linear_small_args, reserved),
    HEAD(mf_embedding_args), FIELD(mf_embedding_args, indices), FIELD(mf_embedding_args, table),
    FIELD(mf_embedding_args, out), FIELD(mf_embedding_args, count), FIELD(mf_embedding_args, rows),
    FIELD(mf_embedding_args, dim), FIELD(mf_embedding_args, index_dtype), FIELD(mf_embedding_args, dtype),
    HEAD(mf_grad_stats_args), FIELD(mf_grad_stats_args, grad), FIELD(mf_grad_stats_args, chunk_sums),
    FIELD(mf_grad_stats_args, nonfinite), FIELD(mf_grad_stats_args, n), FIELD(mf_grad_stats_args, grad_dtype),
    FIELD(mf_grad_stats_args, reserved),
    HEAD(mf_grad_write_args), FIELD(mf_grad_write_args, grad), FIELD(mf_grad_write_args, dst),
    FIELD(mf_grad_write_args, chunk_sums), FIELD(mf_grad_write_args, nonfinite), FIELD(mf_grad_write_args, n),
    FIELD(mf_grad_write_args, grad_dtype), FIELD(mf_grad_write_args, dst_dtype),
    FIELD(mf_grad_write_args, accumulate), FIELD(mf_grad_write_args, reserved),
    STRUCT(mf_adamw_scalars), FIELD(mf_adamw_scalars, decay), FIELD(mf_adamw_scalars, one_minus_beta1),
    FIELD(mf_adamw_scalars, one_minus_beta2), FIELD(mf_adamw_scalars, beta2), FIELD(mf_adamw_scalars, step_size),
    FIELD(mf_adamw_scalars, sqrt_bc2), FIELD(mf_adamw_scalars, eps), FIELD(mf_adamw_scalars, coef),
    HEAD(mf_adamw_args), FIELD(mf_adamw_args, grad), FIELD(mf_adamw_args, exp_avg), FIELD(mf_adamw_args, exp_avg_sq),
    FIELD(mf_adamw_args, master), FIELD(mf_adamw_args, working), FIELD(mf_adamw_args, low),
    FIELD(mf_adamw_args, coef_ptr), FIELD(mf_adamw_args, n), FIELD(mf_adamw_args, grad_dtype),
    FIELD(mf_adamw_args, reserved), FIELD(mf_adamw_args, scalars),
    HEAD(mf_adamw_host_args), FIELD(mf_adamw_host_args, grad), FIELD(mf_adamw_host_args, exp_avg),
    FIELD(mf_adamw_host_args, exp_avg_sq), FIELD(mf_adamw_host_args, master), FIELD(mf_adamw_host_args, working),
    FIELD(mf_adamw_host_args, low), FIELD(mf_adamw_host_args, n), FIELD(mf_adamw_host_args, grad_dtype),
    FIELD(mf_adamw_host_args, threads), FIELD(mf_adamw_host_args, scalars),
    HEAD(mf_master_host_args), FIELD(mf_master_host_args, master), FIELD(mf_master_host_args, working),
    FIELD(mf_master_host_args, low), FIELD(mf_master_host_args, n), FIELD(mf_master_host_args, mode),
    FIELD(mf_master_host_args, threads),
};

extern "C" const mf_layout_row *mf_layout(uint32_t *rows) {
  if (!rows) return nullptr;
  *rows = sizeof kRows / sizeof kRows[0];
  return kRows;
}
