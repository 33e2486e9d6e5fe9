"""The C ABI: layouts, refusals, and every op of the host library on raw pointers."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memferry_npu.backend import abi, build
from memferry_npu.backend import arithmetic as ar

f32 = np.float32
SIZES = [0, 1, 7, 65_535, 65_536, 65_537, 200_003]
CTX = abi.Ctx(device=-1, max_cores=2)


@pytest.fixture(scope="module")
def lib() -> abi.OpsLibrary:
    try:
        return abi.OpsLibrary(build.build_host_ops().path)
    except build.BuildError as error:
        pytest.skip(f"native host ops: {error}")


def array(n: int, dtype: Any, shift: int = 1, fill: int = 0xA5) -> np.ndarray:
    """A poisoned array that starts `shift` elements past a 64-byte boundary."""
    size = np.dtype(dtype).itemsize
    memory = np.full(n * size + 64 * size + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64 + shift * size
    return memory[start : start + n * size].view(dtype)


def put(values: np.ndarray, shift: int = 1) -> np.ndarray:
    out = array(values.size, values.dtype, shift)
    out[:] = values.reshape(-1)
    return out


def at(values: np.ndarray) -> int:
    return values.ctypes.data


def bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, nearest even (activations)."""
    b = np.ascontiguousarray(x, f32).view(np.uint32)
    rounded = ((b + np.uint32(0x7FFF) + ((b >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


class TestLayout:
    def test_mirrors_equal_the_compilers_layout(self, lib: abi.OpsLibrary) -> None:
        mirrored: dict[tuple[str, str], tuple[int, int]] = {}
        for name, struct in abi.STRUCTS.items():
            mirrored[name, ""] = (0, ctypes.sizeof(struct))
            for field, *_ in struct._fields_:
                place = getattr(struct, field)
                mirrored[name, field] = (place.offset, place.size)
        assert mirrored == lib.layout()

    def test_no_padding(self) -> None:
        for name, struct in abi.STRUCTS.items():
            sizes = [getattr(struct, field).size for field, *_ in struct._fields_]
            assert sum(sizes) == ctypes.sizeof(struct), name

    def test_constants_are_those_of_the_header(self) -> None:
        text = (build.SOURCE_DIR / "memferry_ops.h").read_text()
        values = {name: int(value) for name, value in re.findall(r"\b(MF_\w+) = (\d+)", text)}
        for name in ("F32", "BF16", "F16", "I32", "I64", "MASTER_ROUND", "MASTER_SPLIT", "MASTER_JOIN"):
            assert values[f"MF_{name}"] == getattr(abi, name)
        assert {values[name]: name for name in abi.ERROR_NAMES.values()} == abi.ERROR_NAMES
        for bit, op in enumerate(abi.OPS):
            assert values[f"MF_OP_{op.upper()}"] == 1 << bit
        assert f"#define MF_ABI_VERSION {abi.ABI_VERSION}u" in text
        assert f"#define MF_CHUNK {ar.CHUNK}u" in text

    def test_query(self, lib: abi.OpsLibrary) -> None:
        assert lib.info.backend == b"host" and lib.info.simd and lib.info.compiler
        assert lib.info.ops == (1 << len(abi.OPS)) - 1
        with pytest.raises(abi.OpError, match="info is null"):
            lib._check(lib._lib.mf_query(None))


def refused(lib: abi.OpsLibrary, args: Any, code: int, match: str, ctx: abi.Ctx | None = CTX) -> None:
    with pytest.raises(abi.OpError, match=match) as caught:
        lib.call(ctx, args)
    assert caught.value.code == code


class TestRefusals:
    """Poison stays: nothing is written by a call that is refused."""

    def adamw(self, **change: Any) -> tuple[abi.AdamwHostArgs, list[np.ndarray]]:
        arrays = [array(8, f32) for _ in range(4)]
        fields = dict(zip(("grad", "exp_avg", "exp_avg_sq", "master"), map(at, arrays), strict=True))
        return abi.AdamwHostArgs(**({**fields, "n": 8, "grad_dtype": abi.F32, "threads": 1} | change)), arrays

    @pytest.mark.parametrize("op", abi.OPS)
    def test_versions_of_every_op(self, lib: abi.OpsLibrary, op: str) -> None:
        for field, value in (("struct_bytes", 8), ("abi_version", abi.ABI_VERSION + 1)):
            args = abi.OPS[op]()
            setattr(args, field, value)
            refused(lib, args, abi.EABI, f"mf_{op}: args.{field} is {value}")
            ctx = abi.Ctx(device=-1)
            setattr(ctx, field, value)
            refused(lib, abi.OPS[op](), abi.EABI, f"mf_{op}: ctx.{field} is {value}", ctx)
        refused(lib, abi.OPS[op](), abi.EINVAL, f"mf_{op}: ctx is null", None)
        refused(lib, abi.OPS[op](), abi.EINVAL, "ctx.device is 0", abi.Ctx(device=0))
        with pytest.raises(abi.OpError, match="args is null"):
            lib._check(getattr(lib._lib, f"mf_{op}")(CTX, None))

    @pytest.mark.parametrize("op", abi.OPS)
    def test_workspace(self, lib: abi.OpsLibrary, op: str) -> None:
        assert lib.workspace_bytes(CTX, abi.OPS[op]()) == 0
        with pytest.raises(abi.OpError, match="abi_version"):
            lib.workspace_bytes(self.wrong_ctx(), abi.OPS[op]())
        with pytest.raises(abi.OpError, match="bytes is null"):
            lib._check(getattr(lib._lib, f"mf_{op}_workspace")(abi.OPS[op](), CTX, None))

    def wrong_ctx(self) -> abi.Ctx:
        ctx = abi.Ctx(device=-1)
        ctx.abi_version = 9
        return ctx

    @pytest.mark.parametrize(
        ("change", "code", "match"),
        [
            ({"grad": 0}, abi.EINVAL, "grad is null"),
            ({"exp_avg": 0}, abi.EINVAL, "exp_avg is null"),
            ({"master": 0}, abi.EINVAL, "give master"),
            ({"low": 64}, abi.EINVAL, "give master"),
            ({"master": 0, "low": 64}, abi.EINVAL, "give master"),
            ({"grad_dtype": abi.F16}, abi.EDTYPE, "grad_dtype is 3"),
            ({"grad_dtype": 0}, abi.EDTYPE, "grad_dtype is 0"),
            ({"n": 2**62}, abi.EINVAL, "too large"),
            ({"n": 2**64 - 1}, abi.EINVAL, "too large"),
        ],
    )
    def test_adamw(self, lib: abi.OpsLibrary, change: dict[str, int], code: int, match: str) -> None:
        args, arrays = self.adamw(**change)
        refused(lib, args, code, f"mf_adamw_host: .*{match}")
        assert all((a.view(np.uint8) == 0xA5).all() for a in arrays)

    def test_adamw_misaligned_and_overlapping(self, lib: abi.OpsLibrary) -> None:
        args, arrays = self.adamw()
        args.exp_avg += 2
        refused(lib, args, abi.EINVAL, "exp_avg is not aligned to its element of 4 bytes")
        args, arrays = self.adamw()
        args.master = args.exp_avg + 16
        refused(lib, args, abi.EINVAL, "exp_avg and master overlap")
        assert all((a.view(np.uint8) == 0xA5).all() for a in arrays)

    def test_the_other_ops(self, lib: abi.OpsLibrary) -> None:
        buffers = [array(64, f32) for _ in range(4)]
        a, b, c, d = map(at, buffers)
        cases: list[tuple[Any, int, str]] = [
            (abi.CopyArgs(dst=a, src=0, bytes=4), abi.EINVAL, "src is null"),
            (abi.CopyArgs(dst=a, src=a + 2, bytes=4), abi.EINVAL, "overlap"),
            (abi.LinearSmallArgs(x=a, w=b, y=c, m=2, n=2, k=2, dtype=abi.I32), abi.EDTYPE, "dtype is 4"),
            (abi.LinearSmallArgs(x=a, w=b, y=c, m=2, n=2, k=2, dtype=abi.F32, reserved=1), abi.EINVAL, "reserved"),
            (abi.LinearSmallArgs(x=a, w=b, y=c, m=2**40, n=2, k=2**40, dtype=abi.F32), abi.EINVAL, "too large"),
            (abi.LinearSmallArgs(x=a, w=b, y=a, m=2, n=2, k=2, dtype=abi.F32), abi.EINVAL, "overlap"),
            (abi.EmbeddingArgs(indices=a, table=b, out=c, count=1, rows=2, dim=2, index_dtype=abi.F32, dtype=abi.F32),
             abi.EDTYPE, "index_dtype"),
            (abi.GradStatsArgs(grad=a, chunk_sums=0, nonfinite=c, n=4, grad_dtype=abi.F32), abi.EINVAL, "chunk_sums"),
            (abi.GradStatsArgs(grad=a, chunk_sums=b, nonfinite=c, n=4, grad_dtype=9), abi.EDTYPE, "grad_dtype is 9"),
            (abi.GradWriteArgs(grad=a, dst=b, chunk_sums=c, nonfinite=d, n=4, grad_dtype=abi.F32, dst_dtype=abi.BF16),
             abi.EDTYPE, "rounded"),
            (abi.GradWriteArgs(grad=a, dst=b, chunk_sums=c, nonfinite=d, n=4, grad_dtype=abi.BF16, dst_dtype=abi.BF16,
                               accumulate=1), abi.EDTYPE, "accumulate needs"),
            (abi.GradWriteArgs(grad=a, dst=b, chunk_sums=c, nonfinite=d, n=4, grad_dtype=abi.F32, dst_dtype=abi.F32,
                               accumulate=2), abi.EINVAL, "accumulate is 2"),
            (abi.AdamwArgs(coef_ptr=a + 1), abi.EINVAL, "coef_ptr is not aligned"),
            (abi.MasterHostArgs(master=a, working=b, low=c, n=4, mode=4), abi.EINVAL, "mode is 4"),
            (abi.MasterHostArgs(master=a, working=b, n=4, mode=abi.MASTER_SPLIT), abi.EINVAL, "low is null"),
        ]  # fmt: skip
        for args, code, match in cases:
            refused(lib, args, code, match)
        assert all((x.view(np.uint8) == 0xA5).all() for x in buffers)

    def test_nothing_to_do_needs_no_pointers(self, lib: abi.OpsLibrary) -> None:
        for args in (
            abi.CopyArgs(),
            abi.LinearSmallArgs(dtype=abi.F32, k=5, m=3),
            abi.EmbeddingArgs(index_dtype=abi.I64, dtype=abi.F32, rows=5, dim=5),
            abi.GradStatsArgs(grad_dtype=abi.F32),
            abi.GradWriteArgs(grad_dtype=abi.BF16, dst_dtype=abi.F32),
            abi.AdamwArgs(grad_dtype=abi.F32),
            abi.AdamwHostArgs(grad_dtype=abi.F32),
            abi.MasterHostArgs(mode=abi.MASTER_JOIN),
        ):
            lib.call(CTX, args)


ENCODE: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    abi.F32: lambda x: x.astype(f32),
    abi.BF16: bf16,
    abi.F16: lambda x: x.astype(np.float16).view(np.uint16),
}
DECODE: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    abi.F32: lambda x: x,
    abi.BF16: ar.bf16_to_f32,
    abi.F16: lambda x: x.view(np.float16).astype(f32),
}


class TestLinearSmall:
    def run(self, lib: abi.OpsLibrary, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, dtype: int) -> np.ndarray:
        (m, k), n = x.shape, w.shape[0]
        buffers = [put(ENCODE[dtype](v)) for v in (x, w)] + ([] if bias is None else [put(ENCODE[dtype](bias))])
        y = array(m * n, buffers[0].dtype)
        args = abi.LinearSmallArgs(
            x=at(buffers[0]), w=at(buffers[1]), bias=0 if bias is None else at(buffers[2]), y=at(y),
            m=m, n=n, k=k, dtype=dtype,
        )  # fmt: skip
        lib.call(CTX, args)
        return y.reshape(m, n)

    def reference(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """The order of the header, in fp32."""
        (m, k), n = x.shape, w.shape[0]
        lanes = np.zeros((m, n, 16), f32)
        for begin in range(0, k, 16):
            width = min(16, k - begin)
            a, b = x[:, None, begin : begin + width], w[None, :, begin : begin + width]
            lanes[:, :, :width] = ar.fma32(a, b, lanes[:, :, :width])
        for h in (8, 4, 2, 1):
            lanes[:, :, :h] += lanes[:, :, h : 2 * h]
        return lanes[:, :, 0] if bias is None else lanes[:, :, 0] + bias

    @pytest.mark.parametrize("dtype", [abi.F32, abi.BF16, abi.F16])
    @pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 7), (2, 9, 64), (5, 33, 131), (256, 8, 40), (2, 3, 0)])
    @pytest.mark.parametrize("with_bias", [False, True])
    def test_bitwise_in_order(
        self, lib: abi.OpsLibrary, dtype: int, shape: tuple[int, int, int], with_bias: bool
    ) -> None:
        m, n, k = shape
        rng = np.random.default_rng([dtype, m, n, k])
        given = [rng.standard_normal(s).astype(f32) for s in ((m, k), (n, k), (n,))]
        x, w, b = (DECODE[dtype](ENCODE[dtype](v)) for v in given)
        bias = b if with_bias else None
        y = self.run(lib, x, w, bias, dtype)
        want = ENCODE[dtype](self.reference(x, w, bias))
        assert y.tobytes() == want.tobytes()
        exact = x.astype(np.float64) @ w.astype(np.float64).T + (0 if bias is None else bias)
        # Tolerance: one rounding to the dtype, and fp32 accumulation over k.
        unit = {abi.F32: 2.0**-23, abi.BF16: 2.0**-8, abi.F16: 2.0**-10}[dtype]
        np.testing.assert_allclose(DECODE[dtype](y), exact, rtol=unit, atol=(k + 1) * 2.0**-20)

    @pytest.mark.parametrize("dtype", [abi.BF16, abi.F16])
    def test_every_half_converts(self, lib: abi.OpsLibrary, dtype: int) -> None:
        every = np.arange(2**16, dtype=np.uint16)
        values = DECODE[dtype](every)
        x = put(every)
        one = put(ENCODE[dtype](np.ones(1, f32)))
        y = array(every.size, np.uint16)
        args = abi.LinearSmallArgs(x=at(x), w=at(one), y=at(y), m=every.size, n=1, k=1, dtype=dtype)
        lib.call(CTX, args)
        finite = ~np.isnan(values)
        # -0 * 1 + 0 is +0: the lanes start from +0.
        assert (DECODE[dtype](y)[finite] == values[finite]).all()
        assert (y[~finite] == {abi.BF16: 0x7FC0, abi.F16: 0x7E00}[dtype]).all()

    def test_half_rounds_to_nearest_even(self, lib: abi.OpsLibrary) -> None:
        # x * w is exact in fp32 here and needs rounding in fp16: subnormal, normal and overflowing results.
        rng = np.random.default_rng(2)
        x = (rng.standard_normal((4000, 1)) * 2.0 ** rng.integers(-14, 11, (4000, 1))).astype(np.float16).astype(f32)
        w = (rng.standard_normal((4, 1)) * 2.0 ** np.array([[-11], [-5], [0], [6]])).astype(np.float16).astype(f32)
        y = self.run(lib, x, w, None, abi.F16)
        with np.errstate(over="ignore"):
            want = (x @ w.T).astype(np.float16)
        assert (y.view(np.float16) == want).all()


class TestEmbedding:
    @pytest.mark.parametrize("index_dtype", [abi.I32, abi.I64])
    @pytest.mark.parametrize("dtype", [abi.F32, abi.BF16])
    @pytest.mark.parametrize(("count", "dim"), [(0, 3), (1, 1), (7, 5), (1001, 33)])
    def test_rows(self, lib: abi.OpsLibrary, index_dtype: int, dtype: int, count: int, dim: int) -> None:
        rng = np.random.default_rng(count)
        kind: Any = np.uint32 if dtype == abi.F32 else np.uint16
        table = put(rng.integers(0, np.iinfo(kind).max, 40 * dim, dtype=kind))
        indices = put(rng.integers(0, 40, count).astype(np.int32 if index_dtype == abi.I32 else np.int64))
        out = array(count * dim, kind)
        args = abi.EmbeddingArgs(
            indices=at(indices), table=at(table), out=at(out), count=count, rows=40, dim=dim,
            index_dtype=index_dtype, dtype=dtype,
        )  # fmt: skip
        lib.call(CTX, args)
        assert (out.reshape(count, dim) == table.reshape(40, dim)[indices]).all()

    @pytest.mark.parametrize("index", [-1, 4])
    def test_index_out_of_range(self, lib: abi.OpsLibrary, index: int) -> None:
        table, out, indices = put(np.ones(4, f32)), array(2, f32), put(np.array([0, index], np.int64))
        args = abi.EmbeddingArgs(
            indices=at(indices), table=at(table), out=at(out), count=2, rows=4, dim=1,
            index_dtype=abi.I64, dtype=abi.F32,
        )  # fmt: skip
        refused(lib, args, abi.EINVAL, rf"indices\[1\] is {index}, outside \[0, 4\)")
        assert (out.view(np.uint8) == 0xA5).all()


@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("n", SIZES)
class TestAtAnyAlignment:
    def test_copy(self, lib: abi.OpsLibrary, n: int, shift: int) -> None:
        src = put(np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8), shift)
        dst = array(n, np.uint8, 3)
        lib.call(CTX, abi.CopyArgs(dst=at(dst), src=at(src), bytes=n))
        assert (dst == src).all()

    def test_stats_and_write(self, lib: abi.OpsLibrary, n: int, shift: int) -> None:
        rng = np.random.default_rng(n)
        g = rng.standard_normal(n).astype(f32)
        half = put(ar.round_bf16(g), shift)
        sums, dst, flag = array(ar.chunk_count(n), f32), put(g, shift), np.zeros(1, np.uint32)
        args = abi.GradWriteArgs(
            grad=at(half), dst=at(dst), chunk_sums=at(sums), nonfinite=at(flag), n=n, grad_dtype=abi.BF16,
            dst_dtype=abi.F32, accumulate=1,
        )  # fmt: skip
        lib.call(CTX, args)
        want = g + ar.bf16_to_f32(half)
        assert dst.tobytes() == want.tobytes() and sums.tobytes() == ar.chunk_sums(want).tobytes() and flag[0] == 0
        if n:
            half[-1] = 0x7F80
            sums[:] = -1
            stats = abi.GradStatsArgs(grad=at(half), chunk_sums=at(sums), nonfinite=at(flag), n=n, grad_dtype=abi.BF16)
            lib.call(CTX, stats)
            assert flag[0] == 1 and sums.tobytes() == ar.chunk_sums(ar.bf16_to_f32(half)).tobytes()
            half[-1] = 0
            lib.call(CTX, stats)
            assert flag[0] == 1  # only ever set: one flag serves many parameters

    def test_device_adamw(self, lib: abi.OpsLibrary, n: int, shift: int) -> None:
        rng = np.random.default_rng(n)
        p, m, g = (rng.standard_normal(n).astype(f32) for _ in range(3))
        v = rng.random(n).astype(f32)
        hi, lo = ar.split_master(p)
        s = ar.adamw_scalars(1e-3, 0.9, 0.99, 1e-8, 0.1, 2)
        want = ar.adamw(p, m, v, g, s, f32(0.25))
        grad, m, v, working, low = (put(x, shift) for x in (g, m, v, hi, lo))
        coef = np.array([0.25], f32)
        scalars = abi.AdamwScalarsStruct(
            s.decay, s.one_minus_beta1, s.one_minus_beta2, s.beta2, s.step_size, s.sqrt_bc2, s.eps, float("nan")
        )
        args = abi.AdamwArgs(
            grad=at(grad), exp_avg=at(m), exp_avg_sq=at(v), working=at(working), low=at(low), coef_ptr=at(coef), n=n,
            grad_dtype=abi.F32, scalars=scalars,
        )  # fmt: skip
        lib.call(CTX, args)
        hi, lo = ar.split_master(want[0])
        for got, expected in zip((m, v, working, low), (want[1], want[2], hi, lo), strict=True):
            assert got.tobytes() == expected.tobytes()
