"""The CPU's draw against XLA's sampler and against the slow policy in float64, for every instruction set."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from headrace.model import sampling
from headrace.pallas_kernels import api
from headrace.pallas_kernels.sample.reference import LANES
from headrace.pallas_kernels.types import Implementation, Kernels, UnsupportedCase
from headrace.serving.core.request import SamplingParams
from headrace.serving.runner.sampling_state import initial_state
from tests.model import slow_sampling
from tests.pallas_kernels.tiled_weights import ISAS, running

CPU = Kernels(implementation=Implementation.CPU)
MARGIN = 1e-5
"""Of a share of the whole weight: float32 sums of some 10,000 weights round by up to this."""
draw = jax.jit(functools.partial(api.draw, kernels=CPU))


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with running(request.param):
        yield


def drawn(logits, params: list[SamplingParams], uniform, real=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """params: of each row."""
    of = [np.array([getattr(p, name) for p in params]) for name in ("temperature", "top_k", "top_p", "min_p")]
    real = np.ones(len(params), bool) if real is None else real
    found = draw(jnp.asarray(logits), real, *of, jnp.asarray(uniform, jnp.float32))
    return tuple(np.asarray(x) for x in found)


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    top_k = int(rng.choice([0, 0, 1, 2, 50, min(vocab, 4097), vocab - 1, vocab, vocab + 1, rng.integers(1, vocab + 1)]))
    return SamplingParams(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5, 20.0, 100.0])),
        top_k=max(top_k, 0),
        top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 1e-4, rng.uniform(0.01, 1)])),
        min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Of different width; some rows of few different values, some with forbidden ids."""
    x = rng.standard_normal((rows, vocab), np.float32) * rng.choice([0.1, 1, 3, 10], (rows, 1)).astype(np.float32)
    x[::5] = np.round(x[::5])
    x[::7] = np.where(rng.random((len(x[::7]), vocab)) < 0.5, -np.inf, x[::7])
    x[:, 0] = np.where(np.isinf(x).all(axis=1), 0, x[:, 0])
    return x


def order_of(vocab: int) -> np.ndarray:
    lanes = math.gcd(vocab, LANES)
    return np.arange(vocab).reshape(-1, lanes).T.reshape(-1)


def trouble(logits: np.ndarray, params: SamplingParams, uniform: float, token: int) -> float:
    """How far uniform is from the place of the token in the slow policy's cumulative distribution; least of those with
    top_p a little lower and higher, where a candidate lies on the border."""
    order = order_of(len(logits))
    place = int(np.flatnonzero(order == token)[0])
    found = []
    for shift in (0.0, -MARGIN, MARGIN):
        top_p = params.top_p if params.top_p == 1 else min(max(params.top_p + shift, 1e-9), 1.0)
        one = replace(params, top_p=top_p, top_k=min(params.top_k, len(logits)))
        with np.errstate(under="ignore"):
            share = slow_sampling.probabilities(logits.astype(np.float64), one)
        total = np.cumsum(share[order])
        gap = max(total[place] - share[token] - uniform, uniform - total[place], 0.0)
        found.append(gap if share[token] > 0 else 1.0)
    return min(found)


@pytest.mark.parametrize(
    ("vocab", "rows"),
    [
        (49152, 24),
        (6400, 200),
        (50257, 24),
        (1000, 300),
        (777, 300),
        (128, 300),
        (17, 300),
        (16, 300),
        (2, 100),
        (1, 3),
    ],
)
def test_against_the_slow_policy_and_xla(vocab: int, rows: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, rows, vocab)
    params = [random_params(rng, vocab) for _ in range(rows)]
    uniform = rng.random(rows, np.float32)
    token, is_finite, has_choice = drawn(logits, params, uniform)
    assert has_choice.all()
    np.testing.assert_array_equal(is_finite, np.isfinite(logits).all(axis=1))
    far = [trouble(x, p, float(u), int(t)) for x, p, u, t in zip(logits, params, uniform, token, strict=True)]
    assert max(far) <= MARGIN, (np.argmax(far), params[int(np.argmax(far))])
    # A row that differs from XLA's, whose own place is as good, is rare.
    theirs = by_xla(logits, params, uniform)
    assert (theirs != token).mean() <= 0.01


def by_xla(logits: np.ndarray, params: list[SamplingParams], uniform: np.ndarray) -> np.ndarray:
    rows, vocab = logits.shape
    state = initial_state(rows - 1, vocab)  # the null slot counts as any other there
    names = ("temperature", "top_k", "top_p", "min_p")
    fields = {f"{name}_B": jnp.asarray([getattr(p, name) for p in params]) for name in names}
    state = state.replace(**{name: value.astype(getattr(state, name).dtype) for name, value in fields.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_uniform", lambda seed, position: as_float(position))
        bits = jnp.asarray(uniform.view(np.int32))
        sampled, _ = jax.jit(sampling.sample)(jnp.asarray(logits), state, jnp.arange(rows), bits, jnp.zeros(rows, bool))
    return np.asarray(sampled.token_R)


def as_float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(temperature=1.2, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=20.0, top_p=0.95),
    ],
)
def test_frequencies(params: SamplingParams) -> None:
    """Chi-square of 4,096 draws."""
    count, vocab = 4096, 640
    rng = np.random.default_rng(5)
    logits = rng.standard_normal(vocab).astype(np.float32) * 2
    token, _, _ = drawn(np.broadcast_to(logits, (count, vocab)), [params] * count, rng.random(count, np.float32))
    share = slow_sampling.probabilities(logits.astype(np.float64), params)
    observed = np.bincount(token, minlength=vocab)
    assert not observed[share == 0].any()
    likely = share * count >= 5
    seen = np.append(observed[likely], observed[~likely].sum())
    wanted = np.append(share[likely], share[~likely].sum()) * count
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3


class TestExtremes:
    hot = SamplingParams(temperature=1.0)

    @pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), hot, SamplingParams(top_k=3, top_p=0.5)])
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("everywhere", [False, True])
    def test_broken_rows(self, bad: float, everywhere: bool, params: SamplingParams) -> None:
        rng = np.random.default_rng(0)
        logits = rng.standard_normal((5, 1000), np.float32)
        clean, _, _ = drawn(logits, [params] * 5, np.full(5, 0.7))
        logits[2, slice(None) if everywhere else 998] = bad
        token, is_finite, has_choice = drawn(logits, [params] * 5, np.full(5, 0.7))
        assert is_finite.tolist() == [True, True, False, True, True]
        assert has_choice[2] == (not everywhere or bad == np.inf)
        assert 0 <= token[2] < 1000
        np.testing.assert_array_equal(np.delete(token, 2), np.delete(clean, 2))

    @pytest.mark.parametrize("vocab", [1, 3, 16, 129, 5000])
    @pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
    def test_one_id_left(self, vocab: int, uniform: float) -> None:
        for place in {0, vocab // 2, vocab - 1}:
            logits = np.full((3, vocab), -np.inf, np.float32)
            logits[:, place] = -1e30
            every = [self.hot, SamplingParams(top_k=7, top_p=0.3), SamplingParams(min_p=1.0, temperature=100.0)]
            assert drawn(logits, every, np.full(3, uniform))[0].tolist() == [place] * 3

    @pytest.mark.parametrize("vocab", [128, 777, 6400])
    def test_equal_logits(self, vocab: int) -> None:
        """No cut takes a part of them."""
        uniform = np.arange(vocab, dtype=np.float32)
        uniform = (uniform + 0.5) / vocab
        for params in (self.hot, SamplingParams(top_k=2), SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0)):
            token, _, _ = drawn(np.full((vocab, vocab), 3, np.float32), [params] * vocab, uniform)
            np.testing.assert_array_equal(token, order_of(vocab))

    def test_ties_at_a_cut_are_all_kept(self) -> None:
        logits = np.full((256, 500), -20, np.float32)
        logits[:, [10, 20, 30]] = 1
        uniform = np.random.default_rng(0).random(256)
        assert set(drawn(logits, [SamplingParams(top_k=2)] * 256, uniform)[0]) == {10, 20, 30}

    def test_greedy_ties_go_to_the_lower_id(self) -> None:
        logits = np.zeros((3, 3000), np.float32)
        logits[0, [2999, 17, 44]], logits[1, [2999, 1024]] = 5, 5
        assert drawn(logits, [SamplingParams(temperature=0.0)] * 3, np.zeros(3))[0].tolist() == [17, 1024, 0]

    @pytest.mark.parametrize("k", [1, 15, 16, 17, 63, 64, 65, 4096, 6399, 6400, 64000])
    def test_top_k_keeps_exactly_k(self, k: int) -> None:
        """Near uniform 1 the last kept id in the order of ids is drawn."""
        logits = np.random.default_rng(k).permutation(6400).astype(np.float32)
        order = order_of(6400)
        kept = order[logits[order] >= 6400 - k]
        rows = np.broadcast_to(logits, (2, 6400))
        token, _, _ = drawn(rows, [SamplingParams(top_k=k, temperature=1e7)] * 2, np.array([0, 1 - 2**-24]))
        assert token.tolist() == [kept[0], kept[-1]]


def test_a_row_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(1)
    logits, uniform = random_logits(rng, 40, 6400), rng.random(40, np.float32)
    params = [random_params(rng, 6400) for _ in range(40)]
    together, _, _ = drawn(logits, params, uniform)
    order = rng.permutation(40)
    shuffled, _, _ = drawn(logits[order], [params[i] for i in order], uniform[order])
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(0, 40, 7):
        assert drawn(logits[i : i + 1], params[i : i + 1], uniform[i : i + 1])[0][0] == together[i]


def test_rows_that_nobody_reads() -> None:
    logits = np.full((3, 100), np.nan, np.float32)
    logits[1, :] = np.arange(100)
    real = np.array([False, True, False])
    token, is_finite, has_choice = drawn(logits, [SamplingParams(temperature=0.0)] * 3, np.zeros(3), real)
    assert token.tolist() == [0, 99, 0]
    assert is_finite.all() and has_choice.all()


@pytest.mark.skipif(len(ISAS) < 2, reason="one instruction set here")
def test_instruction_sets_agree_bit_for_bit() -> None:
    """All sums have one order: also draws at the border of two ids are the same."""
    rng = np.random.default_rng(3)
    logits, uniform = random_logits(rng, 200, 5000), rng.random(200, np.float32)
    params = [random_params(rng, 5000) for _ in range(200)]
    found = []
    for name in ISAS:
        with running(name):
            found.append(drawn(logits, params, uniform)[0])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_refusals() -> None:
    ones = jnp.ones(2)
    with pytest.raises(UnsupportedCase, match=r"top_k of shape \(3,\) for 2 rows"):
        api.draw(jnp.ones((2, 8)), ones, ones, jnp.ones(3), ones, ones, ones, kernels=CPU)
    with pytest.raises(UnsupportedCase, match="logits of bfloat16"):
        api.draw(jnp.ones((2, 8), jnp.bfloat16), ones, ones, ones, ones, ones, ones, kernels=CPU)
    with pytest.raises(UnsupportedCase, match="sample has no tpu"):
        tpu = Kernels(implementation=Implementation.TPU, chip="v6e")
        api.draw(jnp.ones((2, 8)), ones, ones, ones, ones, ones, ones, kernels=tpu)
    with pytest.raises(UnsupportedCase, match="sample has no reference implementation of draw"):
        api.draw(jnp.ones((2, 8)), ones, ones, ones, ones, ones, ones, kernels=sampling.THRESHOLDS)
    with pytest.raises(UnsupportedCase, match="sample has no cpu implementation of top_cut"):
        api.top_cut(jnp.ones((2, 8)), jnp.ones((2, 8)), ones, ones, kernels=CPU)
