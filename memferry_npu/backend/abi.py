"""ctypes mirror of `csrc/memferry_ops.h` and the one way to call its ops.

Owns: the struct layouts, the dtype and error codes, `OpsLibrary`. Must not
import torch, numpy or anything of memferry_npu; the loaders of the host, CUDA
and Ascend C libraries share it. A contract test compares it with the header.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

ABI_VERSION = 1

# enum mf_dtype
F32, BF16, F16, I32, I64 = 1, 2, 3, 4, 5
# enum mf_master_mode
MASTER_ROUND, MASTER_SPLIT, MASTER_JOIN = 1, 2, 3
# enum mf_error
EABI, EINVAL, EDTYPE, EWORKSPACE, ENOMEM, EUNSUPPORTED, EDEVICE = 1, 2, 3, 4, 5, 6, 7
ERROR_NAMES = {
    EABI: "MF_EABI",
    EINVAL: "MF_EINVAL",
    EDTYPE: "MF_EDTYPE",
    EWORKSPACE: "MF_EWORKSPACE",
    ENOMEM: "MF_ENOMEM",
    EUNSUPPORTED: "MF_EUNSUPPORTED",
    EDEVICE: "MF_EDEVICE",
}

_HEAD = [("struct_bytes", c_uint32), ("abi_version", c_uint32)]


class _Versioned(ctypes.Structure):
    """A struct of the ABI; its first two fields fill themselves in."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_bytes=ctypes.sizeof(type(self)), abi_version=ABI_VERSION, **fields)


class Ctx(_Versioned):
    _fields_ = [
        *_HEAD,
        ("device", c_int32),
        ("max_cores", c_uint32),
        ("stream", c_void_p),
        ("workspace", c_uint64),
        ("workspace_bytes", c_uint64),
    ]


class Info(_Versioned):
    _fields_ = [
        *_HEAD,
        ("ops", c_uint32),
        ("has_fma", c_uint32),
        ("backend", c_char * 16),
        ("simd", c_char * 48),
        ("compiler", c_char * 80),
    ]


class CopyArgs(_Versioned):
    _fields_ = [*_HEAD, ("dst", c_uint64), ("src", c_uint64), ("bytes", c_uint64)]


class LinearSmallArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_uint64) for name in ("x", "w", "bias", "y", "m", "n", "k")),
        ("dtype", c_int32),
        ("reserved", c_uint32),
    ]


class EmbeddingArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_uint64) for name in ("indices", "table", "out", "count", "rows", "dim")),
        ("index_dtype", c_int32),
        ("dtype", c_int32),
    ]


class GradStatsArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_uint64) for name in ("grad", "chunk_sums", "nonfinite", "n")),
        ("grad_dtype", c_int32),
        ("reserved", c_uint32),
    ]


class GradWriteArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_uint64) for name in ("grad", "dst", "chunk_sums", "nonfinite", "n")),
        ("grad_dtype", c_int32),
        ("dst_dtype", c_int32),
        ("accumulate", c_uint32),
        ("reserved", c_uint32),
    ]


class AdamwScalarsStruct(ctypes.Structure):
    _fields_ = [
        (name, c_float)
        for name in ("decay", "one_minus_beta1", "one_minus_beta2", "beta2", "step_size", "sqrt_bc2", "eps", "coef")
    ]


_ADAMW_BUFFERS = ("grad", "exp_avg", "exp_avg_sq", "master", "working", "low")


class AdamwArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_uint64) for name in (*_ADAMW_BUFFERS, "coef_ptr", "n")),
        ("grad_dtype", c_int32),
        ("reserved", c_uint32),
        ("scalars", AdamwScalarsStruct),
    ]


class AdamwHostArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        *((name, c_void_p) for name in _ADAMW_BUFFERS),
        ("n", c_uint64),
        ("grad_dtype", c_int32),
        ("threads", c_uint32),
        ("scalars", AdamwScalarsStruct),
    ]


class MasterHostArgs(_Versioned):
    _fields_ = [
        *_HEAD,
        ("master", c_void_p),
        ("working", c_void_p),
        ("low", c_void_p),
        ("n", c_uint64),
        ("mode", c_int32),
        ("threads", c_uint32),
    ]


class LayoutRow(ctypes.Structure):
    _fields_ = [("structure", c_char_p), ("field", c_char_p), ("offset", c_uint64), ("bytes", c_uint64)]


OPS: dict[str, type[_Versioned]] = {
    "copy": CopyArgs,
    "linear_small": LinearSmallArgs,
    "embedding": EmbeddingArgs,
    "grad_stats": GradStatsArgs,
    "grad_write": GradWriteArgs,
    "adamw": AdamwArgs,
    "adamw_host": AdamwHostArgs,
    "master_host": MasterHostArgs,
}
"""Args struct of each op; bit i of `Info.ops` is the i-th op."""

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "mf_ctx": Ctx,
    "mf_info": Info,
    "mf_adamw_scalars": AdamwScalarsStruct,
    **{f"mf_{op}_args": args for op, args in OPS.items()},
}


class OpError(RuntimeError):
    """An op refused its arguments or could not start. Nothing was written."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} [{ERROR_NAMES.get(code, code)}]")
        self.code = code


class OpsLibrary:
    """A loaded library of ops. Calls release the GIL.

    Raises OSError if `path` cannot be loaded, OpError if it speaks another ABI
    version, AttributeError if an op that it should have is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._lib = ctypes.CDLL(self.path)
        self._lib.mf_last_error.restype = c_char_p
        self._lib.mf_query.argtypes = [POINTER(Info)]
        self.info = Info()
        self._check(self._lib.mf_query(self.info))
        self._ops: dict[type[_Versioned], Any] = {}
        self._workspace: dict[type[_Versioned], Any] = {}
        for bit, (op, args) in enumerate(OPS.items()):
            if not self.info.ops >> bit & 1:
                continue
            function = getattr(self._lib, f"mf_{op}")
            function.argtypes = [POINTER(Ctx), POINTER(args)]
            workspace = getattr(self._lib, f"mf_{op}_workspace")
            workspace.argtypes = [POINTER(args), POINTER(Ctx), POINTER(c_uint64)]
            self._ops[args] = function
            self._workspace[args] = workspace

    def has(self, args: type[_Versioned]) -> bool:
        """Whether the library has the op that takes `args`."""
        return args in self._ops

    def call(self, ctx: Ctx | None, args: _Versioned) -> None:
        """Runs the op that takes `args`; raises OpError with the library's sentence."""
        function = self._ops.get(type(args))
        if function is None:
            raise OpError(EUNSUPPORTED, f"{os.path.basename(self.path)} has no op for {type(args).__name__}")
        self._check(function(ctx, args))

    def workspace_bytes(self, ctx: Ctx, args: _Versioned) -> int:
        """Bytes of ctx.workspace that `call` needs for the same arguments."""
        function = self._workspace.get(type(args))
        if function is None:
            raise OpError(EUNSUPPORTED, f"{os.path.basename(self.path)} has no op for {type(args).__name__}")
        out = c_uint64()
        self._check(function(args, ctx, out))
        return out.value

    def layout(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(struct, field) -> (offset, bytes) as the library's compiler laid them out; field "" is the struct."""
        rows = c_uint32()
        self._lib.mf_layout.argtypes = [POINTER(c_uint32)]
        self._lib.mf_layout.restype = POINTER(LayoutRow)
        table = self._lib.mf_layout(rows)
        return {
            (table[i].structure.decode(), table[i].field.decode()): (table[i].offset, table[i].bytes)
            for i in range(rows.value)
        }

    def _check(self, code: int) -> None:
        if code:
            raise OpError(code, (self._lib.mf_last_error() or b"").decode(errors="replace"))
