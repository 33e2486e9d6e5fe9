"""arithmetic.py against exact rational arithmetic, double precision and torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_npu.backend import arithmetic as ar

known_torch = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's own arithmetic is known only for its AVX2 and AVX-512 kernels",
)
f32 = np.float32
NAN_BITS = 0x7FC0_0000


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def from_bits(values: object) -> np.ndarray:
    return np.array(values, np.uint32).view(f32)


def nearest_f32(exact: Fraction) -> float:
    """An exact non-zero rational rounded to fp32: nearest, ties to even, gradual underflow."""
    size = abs(exact)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, -126)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    count = round(size / unit)  # Python rounds a Fraction's ties to even
    value = count * unit
    magnitude = math.inf if value >= Fraction(2) ** 128 else float(value)
    return math.copysign(magnitude, 1 if exact > 0 else -1)


def awkward(rng: np.random.Generator, n: int) -> np.ndarray:
    """fp32 numbers with uniform exponents, many short significands (for ties) and zeros."""
    raw = rng.integers(0, 2**32, n, dtype=np.uint32)
    short = rng.random(n) < 0.5
    raw = np.where(short, raw & np.uint32(0xFFFF_0000), raw)
    raw = np.where(rng.random(n) < 0.05, np.uint32(0), raw)
    return np.where((raw & 0x7F80_0000) == 0x7F80_0000, np.uint32(0x3F80_0000), raw).view(f32)


class TestFma:
    def test_equals_exact_rational_arithmetic(self) -> None:
        rng = np.random.default_rng(1)
        n = 4000
        a, b, c = (awkward(rng, n) for _ in range(3))
        # Half of them with an addend near the product, where cancellation and ties happen.
        with np.errstate(all="ignore"):
            near = (a * b * rng.choice([-1.0, 1.0, 2.0**24, 2.0**-24, -(2.0**25)], n).astype(f32)).astype(f32)
        c = np.where(np.isfinite(near) & (rng.random(n) < 0.5), near, c)
        got = ar.fma32(a, b, c)
        for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            if exact:
                assert value == nearest_f32(exact), (x.hex(), y.hex(), z.hex())
            else:
                assert value == 0.0

    def test_ties_that_double_rounding_gets_wrong(self) -> None:
        # 1 + 2**-24 is a tie in fp32; the third operand's 2**-60 decides, and is lost in double.
        one, tiny = f32(1), f32(2.0**-30)
        a = f32(1 + 2.0**-12)
        assert ar.fma32(tiny, tiny, f32(0)) == f32(2.0**-60)
        product = Fraction(float(a)) * Fraction(float(a))
        assert float(ar.fma32(a, a, f32(2.0**-70))) == nearest_f32(product + Fraction(2) ** -70)
        assert float(ar.fma32(a, a, f32(-(2.0**-70)))) == nearest_f32(product - Fraction(2) ** -70)
        assert ar.fma32(one, one, f32(2.0**-24)) == one

    @pytest.mark.parametrize(
        ("a", "b", "c", "want"),
        [
            (math.inf, 1.0, 1.0, math.inf),
            (math.inf, 1.0, -math.inf, math.nan),
            (math.inf, 0.0, 1.0, math.nan),
            (1.0, 1.0, -math.inf, -math.inf),
            (math.nan, 1.0, 1.0, math.nan),
            (3e38, 2.0, 0.0, math.inf),
            (3e38, 2.0, -3e38, 3e38),
            (-3e38, 2.0, 0.0, -math.inf),
            (2.0**-75, 2.0**-75, 0.0, 0.0),
            (2.0**-100, 2.0**-49, 0.0, 2.0**-149),
        ],
    )
    def test_specials(self, a: float, b: float, c: float, want: float) -> None:
        got = float(ar.fma32(f32(a), f32(b), f32(c)))
        assert (math.isnan(got) and math.isnan(want)) or got == float(f32(want))

    def test_signs_of_zero(self) -> None:
        zero = f32(0)
        assert bits(ar.fma32(-zero, f32(1), -zero)) == 0x8000_0000
        assert bits(ar.fma32(zero, f32(1), -zero)) == 0
        assert bits(ar.fma32(f32(2), f32(3), f32(-6))) == 0


def test_flush_subnormal_and_canonical_nan() -> None:
    x = from_bits([0, 0x8000_0000, 1, 0x807F_FFFF, 0x0080_0000, 0x8080_0000, 0x7F80_0000, 0x7FA0_0001, 0xFFFF_FFFF])
    flushed = [0, 0, 0, 0, 0x0080_0000, 0x8080_0000, 0x7F80_0000, 0x7FA0_0001, 0xFFFF_FFFF]
    assert bits(ar.flush_subnormal(x)).tolist() == flushed
    assert bits(ar.canonical_nan(x)).tolist() == bits(x).tolist()[:7] + [NAN_BITS, NAN_BITS]


class TestScalars:
    def test_double_then_one_rounding(self) -> None:
        s = ar.adamw_scalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 7)
        assert s.decay == float(f32(1 - 3e-4 * 0.1))
        assert s.one_minus_beta1 == float(f32(1 - 0.9))
        assert s.one_minus_beta2 == float(f32(1 - 0.95))
        assert s.beta2 == float(f32(0.95))
        assert s.step_size == float(f32(3e-4 / (1 - 0.9**7)))
        assert s.sqrt_bc2 == float(f32((1 - 0.95**7) ** 0.5))
        assert s.eps == float(f32(1e-8))

    @pytest.mark.parametrize(
        ("change", "word"),
        [({"step": 0}, "step"), ({"lr": -1.0}, "lr"), ({"beta1": 1.0}, "beta1"), ({"beta2": -0.1}, "beta2"),
         ({"eps": math.nan}, "eps"), ({"weight_decay": -1.0}, "weight_decay")],
    )  # fmt: skip
    def test_ranges(self, change: dict[str, float], word: str) -> None:
        values = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1} | change
        with pytest.raises(ValueError, match=word):
            ar.adamw_scalars(**values)  # type: ignore[arg-type]


class TestAgainstTorch:
    """One state is fed to both, 20 times; the parameter restarts from torch's at each step."""

    N = 100_003

    def run(self, weight_decay: float, steps: int = 20) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(old, ours, torch's) parameter after each step; asserts that the moments agree in every bit."""
        rng = np.random.default_rng(7)
        # 1e-12 .. 1e4: no moment is subnormal, which is the one case where they differ by rule.
        scale = 10.0 ** rng.uniform(-12, 4, self.N)
        lr, betas, eps = 1e-2, (0.9, 0.999), 1e-8
        parameter = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(self.N).astype(f32)))
        optimizer = torch.optim.AdamW(
            [parameter], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False, fused=False
        )
        m = v = np.zeros(self.N, f32)
        for step in range(1, steps + 1):
            g = (rng.standard_normal(self.N) * scale).astype(f32)
            old = parameter.detach().numpy().copy()
            p, m, v = ar.adamw(old, m, v, g, ar.adamw_scalars(lr, *betas, eps, weight_decay, step))
            parameter.grad = torch.from_numpy(g.copy())
            optimizer.step()
            state = optimizer.state[parameter]
            # Every element, the last ones that do not fill a vector included: torch's scalar loop
            # for those is compiled with the same contraction. The excepted tail is empty.
            for name, ours in (("exp_avg", m), ("exp_avg_sq", v)):
                wrong = np.flatnonzero(bits(ours) != bits(state[name].numpy()))
                assert wrong.size == 0, f"{name} differs at {wrong[:5]} of {self.N} in step {step}"
            yield old, p, parameter.detach().numpy().copy()

    @known_torch
    def test_moments_bitwise_at_every_small_size(self) -> None:
        # Sizes around every multiple of a vector, for each remainder that a scalar tail can have.
        rng = np.random.default_rng(8)
        s = ar.adamw_scalars(1e-3, 0.9, 0.95, 1e-8, 0.0, 1)
        for n in (*range(1, 140), 1023, 32_767, 32_769, 65_539):
            m, g = (rng.standard_normal(n).astype(f32) for _ in range(2))
            v = rng.random(n).astype(f32)
            _, ours_m, ours_v = ar.adamw(m, m, v, g, s)
            m_t, v_t, g_t = (torch.from_numpy(x.copy()) for x in (m, v, g))
            assert same(ours_m, m_t.lerp_(g_t, 1 - 0.9).numpy()), n
            assert same(ours_v, v_t.mul_(0.95).addcmul_(g_t, g_t, value=1 - 0.95).numpy()), n

    @known_torch
    @pytest.mark.parametrize("weight_decay", [0.0, 0.1])
    def test_moments_bitwise_and_parameter_within_few_ulp(self, weight_decay: float) -> None:
        differing = beyond_two = 0
        for old, ours, theirs in self.run(weight_decay):
            largest = np.maximum(np.abs(old), np.abs(theirs))
            distance = np.abs(ours.astype(np.float64) - theirs) / np.spacing(largest).astype(np.float64)
            # torch's vector square root is off by up to 1 ulp. That moves the update u by at most
            # 8 ulp of u (docs/arithmetic.md), so 2 ulp of the parameter hold where u is small ...
            small = np.abs(old.astype(np.float64) - theirs) <= largest / 16
            assert distance[small].max() <= 2
            # ... and where it is not, |u| <= 2 * largest leaves this; nearly all stay within 2 too.
            assert distance.max() <= 17
            differing += int((distance > 0).sum())
            beyond_two += int((distance > 2).sum())
        assert differing <= 20 * self.N * 4e-3
        assert beyond_two <= 20 * self.N * 5e-5

    @known_torch
    def test_parameter_bitwise_if_the_square_root_is_rounded_exactly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(np.sqrt(x.numpy()))

        monkeypatch.setattr(torch.Tensor, "sqrt", exact_sqrt)
        for _, ours, theirs in self.run(0.1):
            assert same(ours, theirs)

    def test_subnormal_moments_are_flushed_where_torch_keeps_them(self) -> None:
        g = np.full(8, 1e-20, f32)  # g * g * 0.001 = 1e-43 is subnormal
        scalars = ar.adamw_scalars(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)
        _, _, v = ar.adamw(np.ones(8, f32), np.zeros(8, f32), np.zeros(8, f32), g, scalars)
        theirs = torch.zeros(8).mul_(0.999).addcmul_(torch.from_numpy(g), torch.from_numpy(g), value=1 - 0.999)
        assert (bits(v) == 0).all()
        assert (theirs.numpy() > 0).all() and (theirs.numpy() < 2.0**-126).all()


class TestAdamw:
    def test_against_double_precision(self) -> None:
        rng = np.random.default_rng(3)
        n = 20_000
        p, m, g = (rng.standard_normal(n).astype(f32) for _ in range(3))
        v = rng.random(n).astype(f32)
        s = ar.adamw_scalars(1e-2, 0.9, 0.999, 1e-8, 0.1, 4)
        coef = f32(0.3)
        got = ar.adamw(p, m, v, g, s, coef)
        p64, m64, v64, g64 = (x.astype(np.float64) for x in (p, m, v, g * coef))
        m64 = m64 + s.one_minus_beta1 * (g64 - m64)
        v64 = s.beta2 * v64 + s.one_minus_beta2 * g64 * g64
        p64 = p64 * s.decay - s.step_size * m64 / (np.sqrt(v64) / s.sqrt_bc2 + s.eps)
        for value, want in zip(got, (p64, m64, v64), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)

    def test_inputs_stay_and_coef_one_is_no_coef(self) -> None:
        rng = np.random.default_rng(4)
        arrays = [rng.random(100).astype(f32) for _ in range(4)]
        before = [a.copy() for a in arrays]
        s = ar.adamw_scalars(1e-2, 0.9, 0.999, 1e-8, 0.1, 1)
        first, second = ar.adamw(*arrays, s), ar.adamw(*arrays, s, 1.0)
        assert all(same(a, b) for a, b in zip(arrays, before, strict=True))
        assert all(same(a, b) for a, b in zip(first, second, strict=True))

    def test_nan_has_one_form(self) -> None:
        g = from_bits([0x7FA0_0001, 0xFFC0_0000, 0x7F80_0000])
        s = ar.adamw_scalars(1e-2, 0.9, 0.999, 1e-8, 0.1, 1)
        p, m, v = ar.adamw(np.ones(3, f32), np.zeros(3, f32), np.zeros(3, f32), g, s)
        assert bits(p).tolist() == [NAN_BITS] * 3  # inf / inf is NaN too
        assert bits(m).tolist() == [NAN_BITS, NAN_BITS, 0x7F80_0000]
        assert bits(v).tolist() == [NAN_BITS, NAN_BITS, 0x7F80_0000]


EDGES = [0, 0x8000_0000, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7F_7FFF, 0x7F7F_8000, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000,
         0xFF7F_FFFF, 0x7F80_0001, 0x7FC0_0000, 0xFFFF_FFFF]  # fmt: skip
u32 = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1))


class TestSplitMaster:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(u32, max_size=64))
    def test_join_inverts_split(self, values: list[int]) -> None:
        master = from_bits(values)
        hi, lo = ar.split_master(master)
        assert (hi.dtype, lo.dtype) == (np.uint16, np.int16)
        want = np.where(np.isnan(master), np.uint32(NAN_BITS), bits(master))
        assert bits(ar.join_master(hi, lo)).tolist() == want.tolist()
        assert same(hi, ar.round_bf16(master))

    def test_every_high_half_with_ties(self) -> None:
        high = np.arange(2**16, dtype=np.uint32) << 16
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            master = (high | np.uint32(low)).view(f32)
            master = master[~np.isnan(master)]
            assert same(ar.join_master(*ar.split_master(master)), master)

    def test_rounds_to_nearest_ties_away(self) -> None:
        rng = np.random.default_rng(5)
        x = awkward(rng, 20_000)
        x = np.concatenate([x, (bits(x) & np.uint32(0xFFFF_0000) | np.uint32(0x8000)).view(f32)])
        x = x[np.abs(x) < 3.3e38].astype(f32)
        got = ar.bf16_to_f32(ar.round_bf16(x)).astype(np.float64)
        down = (bits(x) & np.uint32(0xFFFF_0000)).view(f32).astype(np.float64)
        up = ((bits(x) & np.uint32(0xFFFF_0000)) + np.uint32(0x1_0000)).view(f32).astype(np.float64)
        exact = x.astype(np.float64)
        away = np.abs(up - exact) <= np.abs(exact - down)
        assert (got == np.where(away, up, down)).all()

    def test_differs_from_torch_in_ties_only(self) -> None:
        x = awkward(np.random.default_rng(6), 50_000)
        theirs = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
        tie = (bits(x) & 0xFFFF) == 0x8000
        assert (ar.round_bf16(x) == theirs)[~tie].all()


class TestNorm:
    @pytest.mark.parametrize("n", [0, 1, 7, 65_535, 65_536, 65_537, 200_003])
    def test_against_double(self, n: int) -> None:
        x = np.random.default_rng(n).standard_normal(n).astype(f32)
        sums = ar.chunk_sums(x)
        assert sums.dtype == f32 and sums.shape == (ar.chunk_count(n),)
        for index, value in enumerate(sums):
            part = x[index * ar.CHUNK : (index + 1) * ar.CHUNK].astype(np.float64)
            assert float(value) == pytest.approx(float((part * part).sum()), rel=2e-6)
        assert ar.global_norm([sums]) == pytest.approx(float(np.linalg.norm(x.astype(np.float64))), rel=1e-6)

    def test_tree_order(self) -> None:
        # 1 + 2**-24 is 1 in fp32, and 2**-24 + 2**-24 must meet before 1 to count.
        x = np.zeros(ar.CHUNK, f32)
        x[0], x[1], x[1 + 32768] = 1, 2.0**-12, 2.0**-12
        assert ar.chunk_sums(x)[0] == f32(1 + 2.0**-23)
        x = np.zeros(ar.CHUNK, f32)
        x[0], x[32768], x[16384] = 1, 2.0**-12, 2.0**-12
        assert ar.chunk_sums(x)[0] == f32(1)

    @settings(max_examples=15, deadline=None)
    @given(st.integers(1, 200_000), st.integers(0, 2**32 - 1), st.integers(0, 2))
    def test_a_chunk_depends_on_itself_only(self, n: int, seed: int, chunk: int) -> None:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(n).astype(f32)
        sums = ar.chunk_sums(x)
        chunk %= sums.size
        part = x[chunk * ar.CHUNK : (chunk + 1) * ar.CHUNK]
        assert same(ar.chunk_sums(part), sums[chunk : chunk + 1])
        padded = np.zeros(ar.CHUNK, f32)
        padded[: part.size] = part
        assert same(ar.chunk_sums(padded), sums[chunk : chunk + 1])

    def test_nonfinite(self) -> None:
        for value, want in ((math.inf, True), (-math.inf, True), (math.nan, True), (3e38, False), (1e-45, False)):
            assert ar.has_nonfinite(np.array([0, value, 1], f32)) is want
        assert ar.has_nonfinite(np.empty(0, f32)) is False
        # Finite elements whose squares are not: the norm tells, the flag does not.
        assert ar.chunk_sums(np.array([3e38], f32))[0] == math.inf
        assert bits(ar.chunk_sums(from_bits([0xFFC0_0001]))).tolist() == [NAN_BITS]

    def test_clip(self) -> None:
        assert ar.clip_coef(0.0, 1.0) == f32(1) and ar.clip_coef(0.5, 1.0) == f32(1)
        assert ar.clip_coef(3.0, 1.0) == f32(1.0 / (3.0 + 1e-6))
        assert ar.clip_coef(math.inf, 1.0) == f32(0) and np.isnan(ar.clip_coef(math.nan, 1.0))
        assert isinstance(ar.clip_coef(3.0, 1.0), f32)

    def test_skip_rule(self) -> None:
        assert ar.skips_step(True, None) and ar.skips_step(True, 1.0) and ar.skips_step(False, math.inf)
        assert ar.skips_step(False, math.nan) and not ar.skips_step(False, None) and not ar.skips_step(False, 1.0)
