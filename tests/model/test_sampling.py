import functools
import math
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from headrace.model import sampling
from headrace.model.sampling import Sampled, SamplingState, sample
from headrace.pallas_kernels import api
from headrace.pallas_kernels.sample.reference import LANES
from headrace.pallas_kernels.types import Implementation, Kernels, UnsupportedCase
from headrace.serving.core.plan import SlotLoad, SlotRef
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.runner.sampling_state import initial_state, load_scalars, load_with_rows, pack_load
from tests.model import slow_sampling

# Enough ids for the search among the best blocks, and for cuts that lie deeper.
VOCAB, SLOTS = 6400, 10
GREEDY = SamplingParams(temperature=0.0)

RUNS = {
    "xla": jax.jit(sample),
    "native": jax.jit(functools.partial(sample, kernels=Kernels(implementation=Implementation.CPU))),
}
run = RUNS["xla"]
top_cut = jax.jit(functools.partial(api.top_cut, kernels=sampling.THRESHOLDS))
load_rows = jax.jit(load_with_rows)


@pytest.fixture(autouse=True, params=RUNS)
def _sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tests, with XLA's own code and with the CPU's native draw."""
    monkeypatch.setattr(sys.modules[__name__], "run", RUNS[request.param])


def request(params: SamplingParams, prompt: tuple[int, ...] = (1,), stops: tuple[int, ...] = ()) -> Request:
    stop = StopRule(max_tokens=100, stop_token_ids=stops)
    return Request(request_id=RequestId(1), prompt_ids=prompt, sampling=params, stop=stop)


def state_of(*tenants: tuple[Request, tuple[int, ...]]) -> SamplingState:
    """Tenant i, with the tokens that it generated before, in slot i."""
    state = initial_state(SLOTS, VOCAB)
    for slot, (tenant, output) in enumerate(tenants):
        load = SlotLoad(slot=SlotRef(slot, 0), request=tenant, output_ids=output)
        packed = pack_load(load, SLOTS, VOCAB)
        blank = (np.zeros(VOCAB, np.float32), np.zeros(VOCAB, bool), np.zeros(VOCAB, np.int32))
        state = load_rows(state, packed.scalars, *(packed.rows or blank))
    return state


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, VOCAB), np.float32) * scale


def draw(
    logits: np.ndarray, *tenants: tuple[Request, tuple[int, ...]], position: int = 7, holds: bool = False
) -> tuple[Sampled, SamplingState]:
    rows = len(logits)
    slots = np.arange(rows, dtype=np.int32)
    positions = np.full(rows, position, np.int32)
    return run(jnp.asarray(logits), state_of(*tenants), slots, positions, np.full(rows, holds))


def tokens_of(params: SamplingParams, logits_V: np.ndarray, count: int) -> np.ndarray:
    """count draws at positions 0, 1, …: one row of the same logits each."""
    rows = np.broadcast_to(logits_V, (SLOTS, VOCAB))
    state = state_of(*[(request(params), ())] * SLOTS)
    slots = np.arange(SLOTS, dtype=np.int32)
    holds = np.zeros(SLOTS, bool)
    steps = [
        run(rows, state, slots, np.arange(first, first + SLOTS, dtype=np.int32), holds)[0].token_R
        for first in range(0, count, SLOTS)
    ]
    return np.concatenate(steps)


POLICIES = {
    "plain": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.7),
    "min_p": SamplingParams(temperature=1.2, min_p=0.1),
    "all cuts": SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
    "hot": SamplingParams(temperature=100.0),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.4, top_k=20
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias=((5, 4.0), (9, -100.0)), top_p=0.95),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(3, 4, 200), logit_bias=((3, 1.0),)),
    "greedy": GREEDY,
    "deep top_k": SamplingParams(temperature=1.0, top_k=5000),
    "deep top_p": SamplingParams(temperature=20.0, top_p=0.95),
}


class TestAgainstSlowPolicy:
    @pytest.mark.parametrize("name", POLICIES)
    def test_cuts_and_draws(self, name: str) -> None:
        """The drawn id sits where the slow policy's cumulative distribution, in the device's order of ids, holds the
        request's own uniform number."""
        params = POLICIES[name]
        prompt, output, stops = (1, 7, 7, 30), (9, 9, 50), (2, 11)
        logits = random_logits(SLOTS, seed=len(name))
        tenants = [(request(replace(params, seed=row << 33 | row), prompt, stops), output) for row in range(SLOTS)]
        sampled, _ = draw(logits, *tenants, holds=True)
        lanes = math.gcd(VOCAB, LANES)
        order = np.array([index * lanes + lane for lane in range(lanes) for index in range(VOCAB // lanes)])
        for row in range(SLOTS):
            x = slow_sampling.edited(logits[row], params, prompt, output, stops)
            token = int(sampled.token_R[row])
            if params.is_greedy:
                assert token == x.argmax()
                continue
            probability = slow_sampling.probabilities(x, params)
            assert probability[token] > 0
            total = np.cumsum(probability[order])
            place = int(np.flatnonzero(order == token)[0])
            number = slow_sampling.uniform(row << 33 | row, 7)
            assert total[place] - probability[token] - 1e-5 <= number <= total[place] + 1e-5

    @pytest.mark.parametrize("name", [name for name in POLICIES if name != "greedy"])
    def test_frequencies(self, name: str) -> None:
        """Chi-square over 2,048 positions of one seed, against the slow policy's probabilities."""
        params = replace(POLICIES[name], seed=1234)
        logits = random_logits(1, seed=3)[0]
        probability = slow_sampling.probabilities(slow_sampling.edited(logits, params, (1,), (), ()), params)
        counts = np.bincount(tokens_of(params, logits, 2048), minlength=VOCAB)
        assert not counts[probability == 0].any()
        likely = probability * 2048 >= 5
        observed = np.append(counts[likely], counts[~likely].sum())
        expected = np.append(probability[likely], probability[~likely].sum()) * 2048
        observed, expected = observed[expected > 0], expected[expected > 0]
        if len(observed) > 1:
            assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3

    def test_a_draw_of_one_candidate(self) -> None:
        """A cut below every other candidate's share leaves the best one."""
        logits = random_logits(SLOTS)
        for params in (SamplingParams(top_p=1e-6), SamplingParams(min_p=1.0), SamplingParams(top_k=1)):
            sampled, _ = draw(logits, *[(request(params), ())] * SLOTS)
            np.testing.assert_array_equal(sampled.token_R, logits.argmax(axis=1))

    def test_ties_at_a_cut_are_all_kept(self) -> None:
        logits = np.full(VOCAB, -20.0, np.float32)
        logits[[10, 20, 30]] = 1.0
        assert set(tokens_of(SamplingParams(top_k=2), logits, 256)) == {10, 20, 30}

    @pytest.mark.parametrize("k", [63, 64, 65, 4095, 4096, 4097, VOCAB - 1, VOCAB, 10 * VOCAB])
    def test_top_k_at_the_borders_of_the_search(self, k: int) -> None:
        """One candidate per block and many in one block: the k-th largest value, found either way."""
        spread = np.arange(VOCAB, dtype=np.float32)[None]
        for logits in (spread, spread.reshape(64, -1).T.reshape(1, -1), -spread):
            z = logits / VOCAB - logits.max() / VOCAB
            cut = np.asarray(top_cut(z, np.exp(z), np.array([k]), np.array([1.0], np.float32)))
            kept = (z[0] >= cut[0]).sum()
            assert kept == min(k, VOCAB)


class TestGreedy:
    def test_ties_go_to_the_lower_id(self) -> None:
        logits = np.zeros((2, VOCAB), np.float32)
        logits[0, [300, 17, 44]] = 5
        sampled, _ = draw(logits, (request(GREEDY), ()), (request(GREEDY), ()))
        assert sampled.token_R.tolist() == [17, 0]

    @pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-30, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
    @pytest.mark.parametrize("top_p", [1.0, 1e-4])
    def test_small_temperatures_are_greedy(self, temperature: float, top_p: float) -> None:
        """O06. Two best candidates 0.001 apart, in one batch with temperature 1."""
        logits = random_logits(2)
        logits[0, [70, 60]] = 12.001, 12.0
        cold = SamplingParams(temperature=temperature, top_p=top_p, seed=1, num_logprobs=5)
        hot = SamplingParams(temperature=1.0, seed=9)
        sampled, _ = draw(logits, (request(cold), ()), (request(hot), ()))
        alone, _ = draw(logits, (request(GREEDY), ()), (request(hot), ()))
        assert sampled.token_R[0] == 70
        assert sampled.token_R[1] == alone.token_R[1]
        assert np.isfinite(sampled.logprob_R).all() and np.isfinite(sampled.top_logprob_RA).all()

    def test_a_temperature_above_them_is_not(self) -> None:
        logits = np.full(VOCAB, -20.0, np.float32)
        logits[[60, 70]] = 1.0, 1.005
        assert set(tokens_of(SamplingParams(temperature=0.01, seed=3), logits, 256)) == {60, 70}


class TestMinTokens:
    def test_holds_off_every_stop_id(self) -> None:
        """O05: several end ids; and the last id of the vocabulary is not one of them."""
        logits = random_logits(1)
        logits[0, [2, 0, VOCAB - 1]] = 30, 29, 28
        tenant = (request(GREEDY, stops=(2, 0)), ())
        assert draw(logits, tenant, holds=True)[0].token_R[0] == VOCAB - 1
        assert draw(logits, tenant, holds=False)[0].token_R[0] == 2

    def test_stronger_than_bias(self) -> None:
        logits = random_logits(1)
        biased = request(replace(GREEDY, logit_bias=((2, 100.0), (VOCAB - 1, 90.0))), stops=(2,))
        assert draw(logits, (biased, ()), holds=True)[0].token_R[0] == VOCAB - 1

    def test_no_id_left_is_not_finite(self) -> None:
        only_stop = request(replace(GREEDY, allowed_token_ids=(2,)), stops=(2,))
        sampled, _ = draw(random_logits(2), (only_stop, ()), (request(GREEDY), ()), holds=True)
        assert sampled.is_finite_R.tolist() == [False, True]


class TestPenalties:
    def test_repetition_sees_the_prompt_presence_and_frequency_do_not(self) -> None:
        """O08."""
        logits = np.zeros((3, VOCAB), np.float32)
        logits[:, 7], logits[:, 8] = 2.0, 1.9
        sampled, _ = draw(
            logits,
            (request(replace(GREEDY, repetition_penalty=1.3), prompt=(7, 7)), ()),
            (request(replace(GREEDY, presence_penalty=1.5), prompt=(7, 7)), ()),
            (request(replace(GREEDY, frequency_penalty=1.5), prompt=(7, 7)), ()),
        )
        assert sampled.token_R.tolist() == [8, 7, 7]

    def test_own_output_counts_from_the_first_token_on(self) -> None:
        logits = np.zeros((1, VOCAB), np.float32)
        logits[0, [7, 8, 9]] = 3.0, 2.5, 2.2
        state = state_of((request(replace(GREEDY, frequency_penalty=1.0)), ()))
        tokens = []
        for position in range(4):
            sampled, state = run(logits, state, np.array([0]), np.array([position]), np.array([False]))
            tokens.append(int(sampled.token_R[0]))
        assert tokens == [7, 8, 9, 7]
        assert state.output_count_BV[0, [7, 8, 9]].tolist() == [2, 1, 1]

    def test_a_reloaded_slot_forgets_the_last_tenant(self) -> None:
        """The rows of V stay behind when the next tenant has no use for them."""
        state = state_of((request(replace(GREEDY, logit_bias=((5, 100.0),), frequency_penalty=2.0)), (1, 1, 1)))
        logits = random_logits(1)
        load = SlotLoad(slot=SlotRef(0, 1), request=request(GREEDY), output_ids=())
        packed = pack_load(load, SLOTS, VOCAB)
        assert packed.rows is None
        state = jax.jit(load_scalars)(state, packed.scalars)
        sampled, _ = run(logits, state, np.array([0]), np.array([1]), np.array([False]))
        assert sampled.token_R[0] == logits[0].argmax()


class TestLogprobs:
    wants = SamplingParams(temperature=0.0, num_logprobs=20)

    def test_are_the_models_own(self) -> None:
        """O09, O10: before bias, penalties, temperature and cuts; chosen finite also where only it was allowed."""
        logits = random_logits(4)
        odd = replace(self.wants, temperature=2.0, top_k=3, seed=5, repetition_penalty=1.5)
        masked = replace(self.wants, allowed_token_ids=(264,))
        pushed = replace(self.wants, logit_bias=((int(logits[3].argmax()), -100.0),))
        sampled, _ = draw(logits, *[(request(p), ()) for p in (self.wants, odd, masked, pushed)])
        exact = logits.astype(np.float64)
        exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
        assert sampled.token_R[2] == 264
        for row in range(4):
            token = int(sampled.token_R[row])
            order = sorted(range(VOCAB), key=lambda i: (-logits[row, i], i))
            assert sampled.top_id_RA[row].tolist() == order[:20]
            np.testing.assert_allclose(sampled.top_logprob_RA[row], exact[row, order[:20]], atol=1e-5)
            np.testing.assert_allclose(sampled.logprob_R[row], exact[row, token], atol=1e-5)
            assert sampled.rank_R[row] == order.index(token) + 1

    def test_equal_candidates_are_sorted_by_id(self) -> None:
        logits = np.full((1, VOCAB), -1.0, np.float32)
        logits[0, [90, 80, 100]] = 4.0
        sampled, _ = draw(logits, (request(replace(self.wants, allowed_token_ids=(90,))), ()))
        assert sampled.top_id_RA[0, :5].tolist() == [80, 90, 100, 0, 1]
        assert sampled.rank_R[0] == 2


class TestRows:
    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("name", ["greedy", "all cuts"])
    def test_a_broken_row_is_reported_and_disturbs_no_other(self, bad: float, name: str) -> None:
        params = replace(POLICIES[name], num_logprobs=3)
        logits = random_logits(4)
        clean, _ = draw(logits, *[(request(params), ())] * 4)
        logits[2, 100] = bad
        sampled, _ = draw(logits, *[(request(params), ())] * 4)
        assert sampled.is_finite_R.tolist() == [True, True, False, True]
        assert 0 <= int(sampled.token_R[2]) < VOCAB
        for field in ("token_R", "logprob_R", "rank_R", "top_id_RA", "top_logprob_RA"):
            ours, theirs = np.asarray(getattr(sampled, field)), np.asarray(getattr(clean, field))
            np.testing.assert_array_equal(np.delete(ours, 2, axis=0), np.delete(theirs, 2, axis=0))

    def test_a_row_does_not_depend_on_batch_mates_or_slot(self) -> None:
        """Every policy at once, in two orders: each row gives the same token, bit-equal logprobs included."""
        params = [replace(p, seed=i, num_logprobs=2) for i, p in enumerate(list(POLICIES.values())[-SLOTS:])]
        logits = random_logits(SLOTS)
        forward, _ = draw(logits, *[(request(p), (4,)) for p in params])
        order = np.random.default_rng(1).permutation(SLOTS)
        shuffled, _ = draw(logits[order], *[(request(params[i]), (4,)) for i in order])
        for ours, theirs in zip(jax.tree.leaves(shuffled), jax.tree.leaves(forward), strict=True):
            np.testing.assert_array_equal(ours, np.asarray(theirs)[order])
        for row, p in enumerate(params):
            mates = [(request(GREEDY), ())] * SLOTS
            mates[row] = (request(p), (4,))
            alone, _ = draw(logits, *mates)
            assert alone.token_R[row] == forward.token_R[row]

    def test_the_draw_follows_seed_and_position_alone(self) -> None:
        logits = np.zeros(VOCAB, np.float32)
        params = SamplingParams(seed=2**63 - 1)
        first = tokens_of(params, logits, 64)
        np.testing.assert_array_equal(tokens_of(params, logits, 64), first)
        assert (tokens_of(replace(params, seed=2**62 - 1), logits, 64) != first).any()
        assert len(set(first.tolist())) > 32

    def test_only_the_rows_own_slots_change(self) -> None:
        state = state_of(*[(request(GREEDY), ())] * SLOTS)
        logits = random_logits(2)
        sampled, after = run(logits, state, np.array([5, SLOTS]), np.array([3, 0]), np.array([False, False]))
        assert after.last_token_B[5] == sampled.token_R[0]
        changed = np.flatnonzero((np.asarray(after.output_count_BV) != 0).any(axis=1))
        assert changed.tolist() == [5, SLOTS]
        assert after.last_token_B[:5].tolist() == [0] * 5


def test_tiny_vocabularies_have_fewer_alternatives() -> None:
    assert sampling.num_alternatives(8) == 8
    assert sampling.num_alternatives(49152) == 20


def test_the_cuts_have_no_kernel_and_say_so() -> None:
    kernels = Kernels(implementation=Implementation.TPU, chip="v6e")
    one = jnp.zeros(1)
    with pytest.raises(UnsupportedCase, match="sample has no tpu"):
        api.top_cut(one[None], one[None], one, one, kernels=kernels)
