"""Layers of experts: choices against numpy, sorted dispatch against every expert computed, ranges against the whole."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model import moe
from headrace.model.config import ModelConfig
from headrace.model.decoder import forward_counting, stack_layers
from headrace.model.init import init_weights
from headrace.model.router import Gate, Router, RouterBias, RouterScore
from headrace.model.weights import LayerWeights
from headrace.pallas_kernels.types import Kernels
from headrace.serving.core.errors import ConfigError
from tests.model.paged_steps import Segment, batch, new_pool, pages, run
from tests.model.tiny import FAMILIES_TINY, GPT_OSS_TINY, MIXTRAL_TINY, QWEN3_MOE_TINY, TINY

KERNELS = Kernels()
# Operation by operation they compile for seconds.
experts = jax.jit(moe.experts, static_argnames=("cfg", "kernels"))
dense_experts = jax.jit(moe.dense_experts, static_argnames="cfg")
EXPERT_FIELDS = ("gate_EDF", "up_EDF", "down_EFD", "gate_bias_EF", "up_bias_EF", "down_bias_ED")


def layer_of(cfg: ModelConfig, seed: int = 5) -> LayerWeights[jax.Array]:
    """Random, biases included."""
    rng = np.random.default_rng(seed)
    layer = init_weights(cfg, seed).layers[0]
    biases = {f: getattr(layer, f) for f in ("router_bias_E", "gate_bias_EF", "up_bias_EF", "down_bias_ED")}
    drawn = {f: rng.standard_normal(x.shape).astype(np.float32) for f, x in biases.items() if x is not None}
    return jax.device_put(layer.replace(**drawn))


def tokens(count: int, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, TINY.width)), jnp.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class TestRoute:
    """Each variant, token by token, in float64."""

    @pytest.mark.parametrize("renormalize", [False, True])
    @pytest.mark.parametrize("bias", RouterBias)
    @pytest.mark.parametrize("score", [RouterScore.SOFTMAX, RouterScore.SIGMOID])
    def test_scores_before_the_choice(self, score: RouterScore, bias: RouterBias, renormalize: bool) -> None:
        router = Router(score=score, bias=bias, renormalize=renormalize, scale=2.5)
        cfg = replace(MIXTRAL_TINY, router=router, experts_per_token=3)
        w = layer_of(MIXTRAL_TINY)
        bias_E = np.random.default_rng(3).standard_normal(8)
        if bias is not RouterBias.NONE:
            w = w.replace(router_bias_E=jnp.asarray(bias_E, jnp.float32))
        x_TD = tokens(20)
        expert_TA, weight_TA = (np.asarray(a) for a in moe.route(x_TD, w, cfg))
        logit_TE = np.asarray(x_TD, np.float64) @ np.asarray(w.router_DE, np.float64)
        logit_TE += bias_E if bias is RouterBias.LOGITS else 0
        score_TE = softmax(logit_TE) if score is RouterScore.SOFTMAX else 1 / (1 + np.exp(-logit_TE))
        choice_TE = score_TE + (bias_E if bias is RouterBias.CHOICE else 0)
        for t in range(20):
            chosen = np.argsort(-choice_TE[t], kind="stable")[:3]
            weights = score_TE[t, chosen] / (score_TE[t, chosen].sum() if renormalize else 1) * 2.5
            assert expert_TA[t].tolist() == chosen.tolist()
            np.testing.assert_allclose(weight_TA[t], weights, rtol=1e-5)

    def test_a_softmax_over_the_chosen(self) -> None:
        w, x_TD = layer_of(GPT_OSS_TINY), tokens(20)
        expert_TA, weight_TA = (np.asarray(a) for a in moe.route(x_TD, w, GPT_OSS_TINY))
        logit_TE = np.asarray(x_TD, np.float64) @ np.asarray(w.router_DE, np.float64) + np.asarray(w.router_bias_E)
        for t in range(20):
            chosen = np.argsort(-logit_TE[t], kind="stable")[:2]
            assert expert_TA[t].tolist() == chosen.tolist()
            np.testing.assert_allclose(weight_TA[t], softmax(logit_TE[t, chosen]), rtol=1e-5)

    @pytest.mark.parametrize("cfg", [MIXTRAL_TINY, GPT_OSS_TINY], ids=lambda cfg: cfg.family)
    def test_ties_go_to_the_lower_expert(self, cfg: ModelConfig) -> None:
        w = layer_of(cfg)
        w = w.replace(router_DE=jnp.zeros_like(w.router_DE))
        if w.router_bias_E is not None:
            w = w.replace(router_bias_E=jnp.zeros(8).at[jnp.array([5, 6, 7])].set(1.0))
        expert_TA, weight_TA = moe.route(tokens(4), w, cfg)
        assert np.asarray(expert_TA).tolist() == [[5, 6] if cfg is GPT_OSS_TINY else [0, 1]] * 4
        np.testing.assert_allclose(weight_TA, 0.5, rtol=1e-6)

    def test_bfloat16_activations_and_weights_are_routed_in_float32(self) -> None:
        """Two experts whose logits differ by less than bfloat16 can tell: 16 and 16.03."""
        w = layer_of(MIXTRAL_TINY)
        router = jnp.zeros_like(w.router_DE).at[:, 2].set(0.25).at[:, 6].set(0.25).at[0, 6].set(0.28125)
        w = w.replace(router_DE=router.astype(jnp.bfloat16))
        expert_TA, _ = moe.route(jnp.ones((1, 64), jnp.bfloat16), w, MIXTRAL_TINY)
        assert np.asarray(expert_TA).tolist() == [[6, 2]]


@pytest.mark.parametrize("cfg", [MIXTRAL_TINY, GPT_OSS_TINY], ids=lambda cfg: cfg.family)
class TestExperts:
    @pytest.mark.parametrize("count", [1, 2, 31, 70])
    def test_sorted_dispatch_equals_all_experts_computed(self, cfg: ModelConfig, count: int) -> None:
        w, x_TD = layer_of(cfg), tokens(count)
        chosen = moe.route(x_TD, w, cfg)
        y_TD, load_E = experts(x_TD, w, cfg, *chosen, kernels=KERNELS)
        expected_TD, dense_load_E = dense_experts(x_TD, w, cfg, *chosen)
        np.testing.assert_allclose(y_TD, expected_TD, rtol=1e-5, atol=2e-5)
        assert np.asarray(load_E).tolist() == np.bincount(np.asarray(chosen[0]).ravel(), minlength=8).tolist()
        assert np.array_equal(load_E, dense_load_E)

    def test_experts_without_tokens_are_not_read(self, cfg: ModelConfig) -> None:
        """Every token takes experts 3 and 6; the weights of the others are NaN."""
        w, x_TD = layer_of(cfg), tokens(9)
        poisoned = w.replace(
            **{
                f: jnp.full_like(getattr(w, f), jnp.nan).at[jnp.array([3, 6])].set(getattr(w, f)[jnp.array([3, 6])])
                for f in EXPERT_FIELDS
                if getattr(w, f) is not None
            }
        )
        expert_TA = jnp.tile(jnp.array([[6, 3]], jnp.int32), (9, 1))
        weight_TA = jnp.tile(jnp.array([[0.7, 0.3]]), (9, 1))
        y_TD, load_E = experts(x_TD, poisoned, cfg, expert_TA, weight_TA, kernels=KERNELS)
        expected_TD, _ = dense_experts(x_TD, w, cfg, expert_TA, weight_TA)
        np.testing.assert_allclose(y_TD, expected_TD, rtol=1e-5, atol=2e-5)
        assert np.asarray(load_E).tolist() == [0, 0, 0, 9, 0, 0, 9, 0]

    @pytest.mark.parametrize("computed", [experts, dense_experts], ids=["sorted", "dense"])
    def test_ranges_of_experts_sum_to_the_whole(self, cfg: ModelConfig, computed) -> None:  # type: ignore[no-untyped-def]
        """As a mesh cuts them: each range is given its own weights and where they start, even as an array."""
        w, x_TD = layer_of(cfg), tokens(40)
        options = {"kernels": KERNELS} if computed is experts else {}
        chosen, is_real_T = moe.route(x_TD, w, cfg), jnp.arange(40) < 33
        whole_TD, load_E = computed(x_TD, w, cfg, *chosen, is_real_T=is_real_T, **options)
        total_TD = jnp.zeros_like(whole_TD)
        for first, last in ((0, 3), (3, 4), (4, 8)):
            part = {f: getattr(w, f)[first:last] for f in EXPERT_FIELDS if getattr(w, f) is not None}
            start = jnp.int32(first)
            y_TD, part_load_E = computed(
                x_TD, w.replace(**part), cfg, *chosen, first_expert=start, is_real_T=is_real_T, **options
            )
            is_elsewhere_T = ((chosen[0] < first) | (chosen[0] >= last)).all(axis=1)
            assert not np.asarray(y_TD)[np.asarray(is_elsewhere_T)].any()
            assert np.array_equal(part_load_E, load_E)
            total_TD += y_TD
        np.testing.assert_allclose(total_TD, whole_TD, rtol=1e-5, atol=2e-5)

    def test_padding_gives_zeros_and_does_not_count(self, cfg: ModelConfig) -> None:
        w, x_TD = layer_of(cfg), tokens(40)
        chosen = moe.route(x_TD, w, cfg)
        is_real_T = jnp.asarray(np.random.default_rng(2).random(40) < 0.6)
        y_TD, load_E = experts(x_TD, w, cfg, *chosen, kernels=KERNELS, is_real_T=is_real_T)
        expected_TD, _ = dense_experts(x_TD, w, cfg, *chosen)
        expected_TD = jnp.where(is_real_T[:, None], expected_TD, 0)
        np.testing.assert_allclose(y_TD, expected_TD, rtol=1e-5, atol=2e-5)
        assert int(load_E.sum()) == 2 * int(is_real_T.sum())

    def test_a_token_gets_the_same_bits_in_any_company(self, cfg: ModelConfig) -> None:
        """At every place of the batch, and with mates that leave or fill the tiles of its experts."""
        w = layer_of(cfg)
        layer = jax.jit(lambda x_TD: moe.experts(x_TD, w, cfg, *moe.route(x_TD, w, cfg), kernels=KERNELS)[0])
        row = tokens(1, seed=9)
        found = []
        for place in (0, 7, 39):
            for company in (jnp.zeros((40, 64)), tokens(40, seed=place), jnp.tile(row, (40, 1))):
                found.append(np.asarray(layer(company.at[place].set(row[0])))[place])
        assert all(x.tobytes() == found[0].tobytes() for x in found[1:])


def test_the_gate_of_gpt_oss() -> None:
    """Cut at the limit: the gate above only, the other on both sides."""
    gate = Gate(alpha=1.702, limit=7.0, up_offset=1.0)
    g, u = np.array([-9.0, 2.0, 9.0, 1.0, 1.0]), np.array([0.5, 0.5, 0.5, 9.0, -9.0])
    expected = np.minimum(g, 7) / (1 + np.exp(-1.702 * np.minimum(g, 7))) * (np.clip(u, -7, 7) + 1)
    np.testing.assert_allclose(moe.gated(jnp.asarray(g), jnp.asarray(u), gate), expected, rtol=1e-5)
    np.testing.assert_array_equal(
        moe.gated(jnp.asarray(g), jnp.asarray(u), Gate()), jax.nn.silu(jnp.asarray(g)) * jnp.asarray(u)
    )


def test_a_step_counts_its_real_tokens_in_each_layer() -> None:
    cfg = GPT_OSS_TINY
    weights = jax.device_put(init_weights(cfg, 3))
    ids = tuple(range(3, 40))
    inputs, _ = batch([None, Segment(ids, 0, 1, pages(2))], [Segment(ids, 0, 13, pages(2, 24)[12:])], blocks=4)
    assert np.asarray(moe.real_tokens(inputs.meta, inputs.token_T.size)).tolist() == (
        [False, True] + [True] * 13 + [False] * 19
    )
    count = jax.jit(functools.partial(forward_counting, cfg=cfg))
    *_, load_LE = count(weights, inputs, new_pool(cfg))
    assert load_LE.shape == (2, 8) and load_LE.sum(axis=1).tolist() == [28, 28]
    *_, stacked_LE = count(stack_layers(weights), inputs, new_pool(cfg))
    assert np.array_equal(stacked_LE, load_LE)
    assert (
        jax.eval_shape(functools.partial(forward_counting, cfg=TINY), init_weights(TINY, 3), inputs, new_pool(TINY))[2]
        is None
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a program and everything inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize("cfg", [QWEN3_MOE_TINY, GPT_OSS_TINY], ids=lambda cfg: cfg.family)
def test_scanned_layers_never_cut_out_the_experts_of_a_layer(cfg: ModelConfig) -> None:
    """A kernel's operand that is a slice is a copy: every expert of every layer in each step."""
    inputs, _ = batch([Segment(tuple(range(3, 40)), 0, 1, pages(2))], [], blocks=0)
    weights = jax.eval_shape(stack_layers, init_weights(cfg, 3))
    program = jax.make_jaxpr(functools.partial(forward_counting, cfg=cfg))(weights, inputs, new_pool(cfg))
    slices = [e for e in equations(program.jaxpr) if e.primitive.name in ("slice", "dynamic_slice", "gather")]
    one_layer = cfg.num_experts * cfg.width * cfg.expert_ffn_width
    assert len(slices) > 10 and max(variable.aval.size for e in slices for variable in e.outvars) < one_layer


@pytest.mark.parametrize("cfg", [QWEN3_MOE_TINY, GPT_OSS_TINY], ids=lambda cfg: cfg.family)
def test_a_row_gets_the_same_bits_whatever_runs_beside_it(cfg: ModelConfig) -> None:
    weights, ids, own = jax.device_put(init_weights(cfg, 7)), tuple(range(5, 45)), pages(5)
    free = pages(5, 60)[12:]
    _, pool = run(cfg, weights, new_pool(cfg), [None], [Segment(ids, 0, 21, own)], blocks=6)
    row = Segment(ids, 21, 1, own)
    alone, _ = run(cfg, weights, pool, [row, None, None], [], blocks=0)
    for slot in range(3):
        mates = [Segment(ids, 3 * slot + i, 1, free[10 * i : 10 * i + 10]) for i in range(3)]
        busy, _ = run(cfg, weights, pool, [*mates[:slot], row, *mates[slot + 1 :]], [], blocks=0)
        np.testing.assert_array_equal(busy[slot], alone[0])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_experts", {"num_experts": 1 << 13}),
        ("num_experts", {"num_experts": -1}),
        ("experts_per_token", {"experts_per_token": 9}),
        ("experts_per_token", {"experts_per_token": 0}),
        ("experts_per_token", {"num_experts": 0, "ffn_width": 96, "expert_ffn_width": 0, "router": None}),
        ("expert_ffn_width", {"expert_ffn_width": 0}),
        ("ffn_width", {"ffn_width": 96}),
        (
            "shared_expert_width",
            {"num_experts": 0, "ffn_width": 96, "experts_per_token": 0, "expert_ffn_width": 0, "router": None}
            | {"shared_expert_width": 8},
        ),
        ("router", {"num_experts": 0, "experts_per_token": 0, "expert_ffn_width": 0}),
        ("router", {"router": None}),
        ("sliding_window", {"sliding_window": 0, "window_pattern": (True,)}),
        ("window_pattern", {"sliding_window": 8}),
        ("window_pattern", {"sliding_window": 8, "window_pattern": (False,)}),
        ("window_pattern", {"sliding_window": 8, "window_pattern": (True, False, False)}),
        ("window_pattern", {"window_pattern": (True,)}),
    ],
)
def test_a_config_out_of_range_is_named(field: str, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{field} "):
        replace(MIXTRAL_TINY, **change)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Router(scale=0.0), "router scale is 0.0"),
        (lambda: Router(score=RouterScore.SOFTMAX_CHOSEN, renormalize=True), "softmax_chosen sums to 1"),
        (lambda: Router(score=RouterScore.SOFTMAX_CHOSEN, bias=RouterBias.CHOICE), "takes its bias into the logits"),
        (lambda: Gate(alpha=-1.0), "gate alpha is -1.0"),
        (lambda: Gate(limit=0.0), "gate limit is 0.0"),
        (lambda: Gate(up_offset=float("nan")), "gate up_offset is nan"),
    ],
)
def test_a_router_or_gate_out_of_range_is_named(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=reason):
        make()


def test_configs_are_hashable_and_differ() -> None:
    assert len({TINY, *FAMILIES_TINY}) == 1 + len(FAMILIES_TINY)
