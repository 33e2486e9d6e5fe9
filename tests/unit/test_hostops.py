"""Native and numpy host ops against arithmetic.py, bit for bit; building the native ones."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memferry_npu.backend import arithmetic as ar
from memferry_npu.backend import build
from memferry_npu.backend.hostops import AdamwBuffers, HostOps, NativeHostOps, NumpyHostOps, load_host_ops

f32 = np.float32
ROOT = Path(__file__).resolve().parents[2]
SIZES = [0, 1, 7, 65_535, 65_536, 65_537, 200_003]
KINDS = ["numpy", "native-1", "native-2", "native-5"]


@pytest.fixture(params=KINDS, scope="module")
def ops(request: pytest.FixtureRequest) -> HostOps:
    kind, _, threads = request.param.partition("-")
    if kind == "numpy":
        return NumpyHostOps()
    try:
        return NativeHostOps(int(threads))
    except build.BuildError as error:
        pytest.skip(f"native host ops: {error}")


@pytest.fixture(scope="module")
def native() -> NativeHostOps:
    try:
        return NativeHostOps(2)
    except build.BuildError as error:
        pytest.skip(f"native host ops: {error}")


def tensor(array: np.ndarray) -> torch.Tensor:
    """A torch copy; uint16 becomes bf16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.copy().view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def raw(t: torch.Tensor) -> bytes:
    return t.view(torch.uint8).numpy().tobytes() if t.numel() else b""


def sums_for(n: int) -> torch.Tensor:
    return torch.full((ar.chunk_count(n),), float("nan"))


def wild(rng: np.random.Generator, n: int) -> np.ndarray:
    """Values from subnormal to huge, and zeros of both signs."""
    x = (rng.standard_normal(n) * 2.0 ** rng.uniform(-150, 100, n)).astype(f32)
    x[rng.random(n) < 0.02] = 0.0
    x[rng.random(n) < 0.02] = -0.0
    x[rng.random(n) < 0.02] = f32(3e-42)
    return x


LAYOUTS = ["master", "working", "split"]


def check_adamw(ops: HostOps, n: int, layout: str, grad_dtype: str, steps: int, seed: int = 0) -> None:
    rng = np.random.default_rng([n, seed])
    p, m, v = wild(rng, n), np.zeros(n, f32), np.zeros(n, f32)
    exp_avg, exp_avg_sq = tensor(m), tensor(v)
    hi, lo = ar.split_master(p)
    master = None if layout == "split" else tensor(p)
    working = None if layout == "master" else tensor(hi)
    low = tensor(lo) if layout == "split" else None
    for step in range(1, steps + 1):
        g = wild(rng, n)
        g_bits = ar.round_bf16(g)
        if grad_dtype == "bf16":
            g = ar.bf16_to_f32(g_bits)
        scalars = ar.adamw_scalars(1e-2 * step, 0.9, 0.95, 1e-8, 0.1, step)
        coef = (1.0, 0.37, 1e-3)[step % 3]
        grad = tensor(g_bits if grad_dtype == "bf16" else g)
        before = raw(grad)
        ops.adamw(AdamwBuffers(grad, exp_avg, exp_avg_sq, master, working, low), scalars, coef)
        p, m, v = ar.adamw(p, m, v, g, scalars, coef)
        assert raw(grad) == before
        assert raw(exp_avg) == m.tobytes(), step
        assert raw(exp_avg_sq) == v.tobytes(), step
        hi, lo = ar.split_master(p)
        for got, want in ((master, p), (working, hi), (low, lo)):
            assert got is None or raw(got) == want.tobytes(), step


class TestAdamw:
    @pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_twenty_steps_equal_the_reference(self, ops: HostOps, layout: str, grad_dtype: str) -> None:
        check_adamw(ops, 9_001, layout, grad_dtype, steps=20)

    @pytest.mark.parametrize("n", SIZES)
    def test_sizes(self, ops: HostOps, n: int) -> None:
        for layout in LAYOUTS:
            check_adamw(ops, n, layout, "bf16", steps=1, seed=1)

    def test_nonfinite_values(self, ops: HostOps) -> None:
        g = np.array([np.nan, np.inf, -np.inf, 1, 0] * 50, f32)
        p = np.resize(np.array([1, np.inf, np.nan, -1, 2, 3e38, -np.inf], f32), g.size)
        m, v = np.resize(np.array([0, np.inf, np.nan], f32), g.size), np.ones(g.size, f32)
        scalars = ar.adamw_scalars(1e-2, 0.9, 0.95, 1e-8, 0.1, 1)
        tensors = [tensor(x) for x in (g, m, v, p)]
        working = tensor(ar.round_bf16(p))
        ops.adamw(AdamwBuffers(*tensors, working), scalars, 0.5)
        want = ar.adamw(p, m, v, g, scalars, 0.5)
        for got, expected in zip((tensors[3], tensors[1], tensors[2]), want, strict=True):
            assert raw(got) == expected.tobytes()
        assert raw(working) == ar.round_bf16(want[0]).tobytes()

    def test_flush_denormal_of_the_caller_changes_nothing(self, ops: HostOps) -> None:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormals")
        try:
            g = np.full(70_000, 2.0**-126, np.float64)  # written below without fp32 arithmetic
            grad = torch.from_numpy((g * 0.5).view(np.int64) * 0).to(torch.int32)
            grad += 0x0040_0000  # the bits of 2**-127
            grad = grad.view(torch.float32)
            zeros = [torch.zeros(grad.numel()) for _ in range(2)]
            p = torch.zeros(grad.numel())
            scalars = ar.AdamwScalars(1.0, 0.5, 0.5, 0.5, 2.0**127, 1.0, 1.0)
            acc = torch.zeros(grad.numel())
            ops.adamw(AdamwBuffers(grad, zeros[0], zeros[1], p), scalars, 4.0)
            ops.grad_write(grad, acc, True, sums_for(grad.numel()))
        finally:
            torch.set_flush_denormal(False)
        # g * 4 = 2**-125, m = 2**-126: lost if the subnormal gradient were read as 0.
        assert (zeros[0].numpy().view(np.uint32) == 0x0080_0000).all()
        assert raw(acc) == raw(grad)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"grad": torch.zeros(4, dtype=torch.float16)}, "grad must be torch.float32 or torch.bfloat16"),
            ({"exp_avg": torch.zeros(3)}, "exp_avg must have 4 elements"),
            ({"exp_avg_sq": torch.zeros(8)[::2]}, "contiguous"),
            ({"master": None}, "give master"),
            ({"low": torch.zeros(4, dtype=torch.int16)}, "split master"),
            ({"working": torch.zeros(2, 2, dtype=torch.bfloat16)}, "1-D"),
            ({"master": torch.zeros(4, device="meta")}, "on the CPU"),
        ],
    )
    def test_buffers_are_checked(self, change: dict[str, torch.Tensor | None], match: str) -> None:
        fields = {name: torch.zeros(4) for name in ("grad", "exp_avg", "exp_avg_sq", "master")}
        with pytest.raises(ValueError, match=match):
            AdamwBuffers(**(fields | change))  # type: ignore[arg-type]


class TestGradients:
    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_stats(self, ops: HostOps, n: int, dtype: torch.dtype) -> None:
        grad = torch.randn(n + 1, generator=torch.Generator().manual_seed(n)).to(dtype)[1:]
        sums = sums_for(n)
        assert ops.grad_stats(grad, sums) is False
        assert raw(sums) == ar.chunk_sums(grad.float().numpy()).tobytes()
        if n:
            for bad in (float("inf"), float("nan")):
                grad[n // 2] = bad
                assert ops.grad_stats(grad, sums) is True
                assert raw(sums) == ar.chunk_sums(grad.float().numpy()).tobytes()

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("case", ["f32", "bf16", "widen", "add-f32", "add-bf16"])
    def test_write(self, ops: HostOps, n: int, case: str) -> None:
        generator = torch.Generator().manual_seed(n)
        source = torch.float32 if case in ("f32", "add-f32") else torch.bfloat16
        target = torch.bfloat16 if case == "bf16" else torch.float32
        accumulate = case.startswith("add")
        grad = torch.randn(n, generator=generator).to(source)
        poison = torch.full((n,), float("nan"))
        dst = (torch.randn(n, generator=generator) if accumulate else poison).to(target)
        want = dst + grad.float() if accumulate else grad.to(target)
        sums = sums_for(n)
        assert ops.grad_write(grad, dst, accumulate, sums) is False
        assert raw(dst) == raw(want)
        assert raw(sums) == ar.chunk_sums(want.float().numpy()).tobytes()

    def test_write_statistics_are_those_of_the_value_written(self, ops: HostOps) -> None:
        grad, dst = torch.full((3,), 3e38), torch.full((3,), 3e38)
        assert ops.grad_write(grad, dst, True, sums_for(3)) is True
        assert torch.isinf(dst).all()

    def test_nan_has_one_form(self, ops: HostOps) -> None:
        signed = torch.tensor([-0x003F_FFFF, 0x7FA0_0001] * 4, dtype=torch.int32).view(torch.float32)
        dst, sums = torch.ones(8), sums_for(8)
        assert ops.grad_write(signed, dst, True, sums) is True
        assert (dst.view(torch.int32) == 0x7FC0_0000).all() and sums.view(torch.int32)[0] == 0x7FC0_0000
        assert ops.grad_stats(signed, sums.zero_()) is True
        assert sums.view(torch.int32)[0] == 0x7FC0_0000
        # Without arithmetic a NaN is copied as it is.
        assert ops.grad_write(signed, dst, False, sums) is True
        assert raw(dst) == raw(signed)

    def test_write_in_place(self, ops: HostOps) -> None:
        grad, sums = torch.randn(70_000), sums_for(70_000)
        want = grad.clone()
        assert ops.grad_write(grad, grad, False, sums) is False
        assert raw(grad) == raw(want) and raw(sums) == ar.chunk_sums(want.numpy()).tobytes()

    def test_refused(self, ops: HostOps) -> None:
        f, b = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
        for grad, dst, accumulate in ((f, b, False), (b, b, True), (f, torch.zeros(5), False)):
            with pytest.raises(ValueError, match="dst must"):
                ops.grad_write(grad, dst, accumulate, sums_for(4))
        with pytest.raises(ValueError, match="chunk_sums_out must have 1"):
            ops.grad_stats(f, torch.zeros(2))


class TestCopyAndMaster:
    @pytest.mark.parametrize("n", [0, 1, 7, 65_537, 3_000_001])
    def test_copy(self, ops: HostOps, n: int) -> None:
        src = torch.randint(0, 256, (n + 1,), dtype=torch.uint8)[1:]
        dst = torch.zeros(n + 3, dtype=torch.uint8)
        ops.copy(dst[3:], src)
        assert torch.equal(dst[3:], src) and not dst[:3].any()
        dst.zero_()
        ops.copy_raw(dst.data_ptr(), src.data_ptr(), n)
        assert torch.equal(dst[:n], src)

    def test_copy_refused(self, ops: HostOps) -> None:
        with pytest.raises(ValueError, match="bytes"):
            ops.copy(torch.zeros(3), torch.zeros(4))
        with pytest.raises(ValueError, match="nbytes"):
            ops.copy_raw(0, 0, -1)
        buffer = torch.zeros(8)
        with pytest.raises(RuntimeError, match="overlap"):
            ops.copy(buffer[:4], buffer[2:6])
        with pytest.raises(RuntimeError, match="null"):
            ops.copy_raw(0, buffer.data_ptr(), 4)

    @pytest.mark.parametrize("n", SIZES)
    def test_split_join_round(self, ops: HostOps, n: int) -> None:
        rng = np.random.default_rng(n)
        master = rng.integers(0, 2**32, n, dtype=np.uint32).view(f32)
        hi, lo = ar.split_master(master)
        t = torch.from_numpy(master.view(np.int32)).view(torch.float32)
        working, rounded = (torch.full((n,), 7.0).bfloat16() for _ in range(2))
        low, back = torch.full((n,), 7, dtype=torch.int16), torch.full((n,), 7.0)
        ops.split(t, working, low)
        ops.round_bf16(t, rounded)
        ops.join(working, low, back)
        assert raw(working) == raw(rounded) == hi.tobytes() and raw(low) == lo.tobytes()
        assert raw(back) == ar.canonical_nan(master).tobytes()


def test_calls_from_several_python_threads(native: NativeHostOps) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for n in (1, 40_000, 150_001):
                check_adamw(native, n, "split", "bf16", steps=2, seed=seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


SCRIPT = """
import os, sys, torch
from memferry_npu.backend.hostops import load_host_ops
ops = load_host_ops(3)
x, out = torch.ones(300_000), torch.zeros(5)
assert not ops.grad_stats(x, out) and out.double().sum() == 300_000
if "fork" in sys.argv:
    child = os.fork()
    ops.grad_stats(x, out.zero_())
    assert out.double().sum() == 300_000
    if child == 0:
        os._exit(0 if len(os.listdir("/proc/self/task")) >= 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
print(ops.name)
"""


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()


def test_a_forked_child_gets_threads_of_its_own(native: NativeHostOps) -> None:
    assert finish(start("fork")) == "native"


class TestBuild:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.setenv("MEMFERRY_CACHE", str(tmp_path / "cache"))
        yield tmp_path / "cache"

    def compiler(self, path: Path, body: str) -> str:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def falls_back(self, match: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ops = load_host_ops(1)
        assert ops.name == "numpy" and ops.cause is not None and match in ops.cause
        assert len(caught) == 1 and match in str(caught[0].message)
        check_adamw(ops, 1_001, "working", "bf16", steps=2)

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        self.falls_back("no C++ compiler found")

    def test_cxx_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler -O1")
        self.falls_back("$CXX is 'no-such-compiler'")

    def test_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        says = 'echo note; echo "x.h:1: fatal error: boom" >&2; exit 3'
        script = f'case "$*" in *--version*) echo fake 1.0;; *) {says};; esac'
        monkeypatch.setenv("CXX", self.compiler(tmp_path / "fake", script))
        self.falls_back("failed (exit 3): x.h:1: fatal error: boom")
        assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix == ".so"]

    def test_compiler_that_writes_rubbish(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", self.compiler(tmp_path / "fake", "echo fake 1.0"))
        self.falls_back("libmemferry_host-")  # what the loader says of an empty file

    def test_two_processes_build_once(self, native: NativeHostOps, tmp_path: Path, cache: Path) -> None:
        log = tmp_path / "log"
        real = build.find_compiler()[0]
        script = f'case "$*" in *-shared*) echo one >> {log};; esac\nexec {real} "$@"'
        wrapper = self.compiler(tmp_path / "cxx", script)
        environment = {"CXX": wrapper, "MEMFERRY_CACHE": str(cache)}
        processes = [start(**environment) for _ in range(2)]
        assert [finish(process) for process in processes] == ["native", "native"]
        assert log.read_text().splitlines() == ["one"]
        assert len(list(cache.glob("*.so"))) == 1 and not list(cache.glob(".building-*"))

    def test_cache_is_used_and_keyed_by_flags(self, native: NativeHostOps, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build, "FLAGS", tuple("-O0" if f == "-O3" else f for f in build.FLAGS))
        first, second = build.build_host_ops(), build.build_host_ops()
        assert first.fresh and not second.fresh and first.path == second.path
        monkeypatch.setattr(build, "_locked", lambda target: pytest.fail("a cached library needs no lock"))
        assert build.build_host_ops().path == first.path
        monkeypatch.undo()
        monkeypatch.setenv("MEMFERRY_CACHE", str(first.path.parent))
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
        assert build.build_host_ops().path != first.path

    def test_without_the_machine_flag_results_are_the_same(
        self, native: NativeHostOps, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build, "_machine_flags", lambda compiler: ())
        ops = NativeHostOps(2)
        check_adamw(ops, 3_001, "split", "bf16", steps=3)

    def test_unwritable_cache(self, native: NativeHostOps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("MEMFERRY_CACHE", str(tmp_path / "file" / "below"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ops = load_host_ops(1)
        assert ops.name == "native"
        assert not list((tmp_path / "tmp").iterdir())  # loaded, so removed again
        check_adamw(ops, 1_001, "split", "bf16", steps=1)

    def test_place_of_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMFERRY_CACHE", "/a")
        assert build.cache_dir() == Path("/a")
        monkeypatch.delenv("MEMFERRY_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/b")
        assert build.cache_dir() == Path("/b/memferry")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/c")
        assert build.cache_dir() == Path("/c/.cache/memferry")


def test_threads_and_info(ops: HostOps) -> None:
    assert {"abi_version", "compiler", "flags", "simd"} <= set(ops.info)
    assert ops.threads >= 1
    with pytest.raises(ValueError, match="threads"):
        NumpyHostOps(0)
