from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.serving.core.admission import MAX_LOGIT_BIAS, Limits, refuse_size, validate
from headrace.serving.core.request import (
    MAX_STOP_IDS,
    Rejection,
    RejectionReason,
    Request,
    RequestId,
    SamplingParams,
)
from tests.serving.core.driver import make_config

LIMITS = Limits(vocab_size=1000, max_context=256, page_size=16, num_usable_pages=100, eos_ids=(2, 0))
SMALL_POOL = replace(LIMITS, max_context=8192, num_usable_pages=49)
HUGE = 10**5000
"""More digits than Python is willing to print."""


def check(limits: Limits = LIMITS, **changes: Any) -> Request | Rejection:
    sampling = {k: changes.pop(k) for k in list(changes) if k in SamplingParams.__slots__}
    values: dict[str, Any] = {
        "request_id": RequestId(1),
        "prompt_ids": [5, 6, 7],
        "sampling": SamplingParams(**sampling),
        "max_tokens": 16,
    }
    return validate(limits, **(values | changes))


def accepted(limits: Limits = LIMITS, **changes: Any) -> Request:
    request = check(limits, **changes)
    assert isinstance(request, Request), request
    return request


def refused(limits: Limits = LIMITS, **changes: Any) -> Rejection:
    rejection = check(limits, **changes)
    assert isinstance(rejection, Rejection), rejection
    assert len(rejection.message) < 300
    return rejection


def test_defaults_pass_and_end_ids_are_added() -> None:
    request = accepted()
    assert request.prompt_ids == (5, 6, 7)
    assert request.stop.max_tokens == 16
    assert request.stop.stop_token_ids == (2, 0)


def test_values_are_normalized() -> None:
    request = accepted(
        temperature=1, top_p=1, presence_penalty=-0.0, logit_bias=[[9, 1], (3, -2.5)], allowed_token_ids=[7, 2, 5]
    )
    sampling = request.sampling
    assert type(sampling.temperature) is float and type(sampling.top_p) is float
    assert str(sampling.presence_penalty) == "0.0"
    assert sampling.logit_bias == ((3, -2.5), (9, 1.0))
    assert sampling.allowed_token_ids == (2, 5, 7)


RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e-30, 2.5, 100], [-1e-9, 100.5, HUGE]),
    "top_k": ([0, 1, 1000], [-1, 1001, HUGE]),
    "top_p": ([1e-300, 0.5, 1], [0, -0.1, 1.0001, HUGE]),
    "min_p": ([0, 1.0], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 1, 100.0], [0, -1, 1e-300, 101]),
    "presence_penalty": ([-2, 2.0], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2.0], [-2.1, HUGE]),
    "seed": ([0, 2**63 - 1], [-1, 2**63, HUGE]),
    "max_tokens": ([1, 253], [0, -1]),
    "min_tokens": ([0, 16], [-1, 17, 10**9, HUGE]),
}
FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}


@pytest.mark.parametrize("field", RANGES)
def test_a_range_ends_where_it_says(field: str) -> None:
    good, bad = RANGES[field]
    for value in good:
        accepted(**{field: value})
    for value in bad:
        rejection = refused(**{field: value})
        assert (rejection.reason, rejection.param) == (RejectionReason.INVALID, field)


@pytest.mark.parametrize("field", [*RANGES, "num_logprobs"])
@pytest.mark.parametrize("value", [True, False, "0.5", "5", [1], {}, (), b"1", 1j, nan, inf, -inf, object()])
def test_wrong_types_and_numbers_that_are_not_finite_are_refused(field: str, value: Any) -> None:
    """O07: a comparison with NaN is false, and bool is an int in Python."""
    rejection = refused(**{field: value})
    assert rejection.reason == RejectionReason.INVALID
    assert rejection.param == field.removeprefix("num_")
    assert "nan" not in rejection.message and "inf" not in rejection.message


@pytest.mark.parametrize("field", sorted(set(RANGES) - FLOATS))
def test_an_integer_field_takes_no_float(field: str) -> None:
    value: dict[str, Any] = {field: 5.0}
    assert refused(**value).param == field


def test_logprobs_are_bounded_by_the_limit_and_the_vocabulary() -> None:
    assert accepted(num_logprobs=None).sampling.num_logprobs is None
    assert accepted(num_logprobs=20).sampling.num_logprobs == 20
    assert refused(num_logprobs=21).param == "logprobs"
    assert refused(replace(LIMITS, vocab_size=8, eos_ids=(2,)), num_logprobs=9).param == "logprobs"


@pytest.mark.parametrize("prompt", [[], (), None, "text", 5, [1.0], [True], ["1"], [-1], [1000], [5, HUGE], [None]])
def test_a_prompt_is_a_list_of_ids_of_the_vocabulary(prompt: Any) -> None:
    rejection = refused(prompt_ids=prompt)
    assert (rejection.reason, rejection.param) == (RejectionReason.INVALID, "prompt")


def test_a_bad_id_is_named_by_its_position() -> None:
    assert "entry 2 " in refused(prompt_ids=[1, 2, 1000]).message


@pytest.mark.parametrize(
    "pairs",
    [None, 5, {"1": 2}, [5], [[5]], [[5, 1, 1]], [["5", 1]], [[1000, 1]], [[True, 1]], [[5, nan]], [[5, 100.5]],
     [[5, "1"]], [[5, True]], [[5, 1], [5, 2]], [[HUGE, 1]], [[i, 0] for i in range(MAX_LOGIT_BIAS + 1)]],
)  # fmt: skip
def test_logit_bias_is_checked_pair_by_pair(pairs: Any) -> None:
    limits = replace(LIMITS, vocab_size=5000) if isinstance(pairs, list) and len(pairs) > 1000 else LIMITS
    assert refused(limits, logit_bias=pairs).param == "logit_bias"


@pytest.mark.parametrize("ids", [[], [1, 1], [1000], [-1], "12", [True], 7])
def test_allowed_token_ids_are_distinct_ids(ids: Any) -> None:
    assert refused(allowed_token_ids=ids).param == "allowed_token_ids"


def test_stop_ids_are_merged_with_the_end_ids_and_bounded() -> None:
    assert accepted(stop_token_ids=[7, 2]).stop.stop_token_ids == (2, 0, 7)
    assert accepted(stop_token_ids=[7, 7], ignore_eos=True).stop.stop_token_ids == (7,)
    assert accepted(ignore_eos=True).stop.stop_token_ids == ()
    assert refused(stop_token_ids=[1000]).param == "stop_token_ids"
    most = list(range(10, 10 + MAX_STOP_IDS - 2))
    assert len(accepted(stop_token_ids=most).stop.stop_token_ids) == MAX_STOP_IDS
    assert refused(stop_token_ids=[*most, 99]).param == "stop_token_ids"
    assert refused(ignore_eos=1).param == "ignore_eos"


def test_min_tokens_is_checked_against_max_tokens_given_or_not() -> None:
    """O05 d, e."""
    assert refused(min_tokens=50, max_tokens=10).param == "min_tokens"
    assert refused(min_tokens=10**9, max_tokens=None).param == "min_tokens"
    assert accepted(min_tokens=253, max_tokens=None).stop.min_tokens == 253


def test_min_tokens_may_not_hold_off_everything_that_is_allowed() -> None:
    assert refused(min_tokens=1, allowed_token_ids=[2, 0]).param == "min_tokens"
    accepted(min_tokens=0, allowed_token_ids=[2, 0])
    accepted(min_tokens=1, allowed_token_ids=[2, 0, 5])
    accepted(min_tokens=1, allowed_token_ids=[2, 0], ignore_eos=True)


def test_prompt_and_output_share_the_context() -> None:
    assert accepted(max_tokens=None).stop.max_tokens == 253
    assert accepted(prompt_ids=[1] * 255, max_tokens=None).stop.max_tokens == 1
    rejection = refused(max_tokens=254)
    assert (rejection.reason, rejection.param) == (RejectionReason.CONTEXT_EXCEEDED, "max_tokens")
    assert "253" in rejection.message
    rejection = refused(prompt_ids=[1] * 256)
    assert (rejection.reason, rejection.param) == (RejectionReason.CONTEXT_EXCEEDED, "prompt")
    assert refused(max_tokens=HUGE).reason == RejectionReason.CONTEXT_EXCEEDED
    assert refused(prompt_ids=[-1] * 10**6).reason == RejectionReason.CONTEXT_EXCEEDED, "before each id is looked at"


def test_a_request_beyond_all_pages_never_fits() -> None:
    """O23 a, b: 49 pages of 16 hold 784 positions, and the last output needs none."""
    rejection = refused(SMALL_POOL, prompt_ids=[1] * 1002, max_tokens=1)
    assert (rejection.reason, rejection.param) == (RejectionReason.NEVER_FITS, "prompt")
    rejection = refused(SMALL_POOL, prompt_ids=[1] * 400, max_tokens=600)
    assert (rejection.reason, rejection.param) == (RejectionReason.NEVER_FITS, "max_tokens")
    assert "63 pages" in rejection.message and "49" in rejection.message
    accepted(SMALL_POOL, prompt_ids=[1] * 400, max_tokens=385)
    assert refused(SMALL_POOL, prompt_ids=[1] * 400, max_tokens=386).reason == RejectionReason.NEVER_FITS
    assert accepted(SMALL_POOL, prompt_ids=[1] * 400, max_tokens=None).stop.max_tokens == 385
    assert refused(SMALL_POOL, prompt_ids=[1] * 1002, max_tokens=None).reason == RejectionReason.NEVER_FITS


@pytest.mark.parametrize("namespace", [b"x", b"x" * 31, "x" * 32, None])
def test_a_cache_namespace_is_32_bytes_or_empty(namespace: Any) -> None:
    assert refused(cache_namespace=namespace).param == "cache_namespace"
    assert accepted(cache_namespace=b"x" * 32).cache_namespace == b"x" * 32


def test_the_limits_follow_from_the_scheduler_configuration() -> None:
    limits = Limits.of(make_config(num_pages=64), vocab_size=10, eos_ids=(1,))
    assert (limits.max_context, limits.page_size, limits.num_usable_pages) == (128, 4, 63)
    assert limits.max_total_tokens == 128
    assert replace(limits, num_usable_pages=10).max_total_tokens == 41


@given(
    prompt=st.integers(1, 300), max_tokens=st.integers(1, 300), pages=st.integers(1, 30), context=st.integers(2, 400)
)
def test_what_is_not_refused_fits_exactly(prompt: int, max_tokens: int, pages: int, context: int) -> None:
    limits = replace(LIMITS, max_context=context, num_usable_pages=pages)
    fits = prompt + max_tokens <= context and prompt + max_tokens - 1 <= pages * 16
    assert (refuse_size(prompt, max_tokens, limits) is None) == fits
    assert fits == (prompt + max_tokens <= limits.max_total_tokens)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(
    field=st.sampled_from(
        [*SamplingParams.__slots__, "prompt_ids", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "tenant"]
    ),
    value=ANYTHING,
)
def test_no_value_of_any_type_raises(field: str, value: Any) -> None:
    assert isinstance(check(**{field: value}), Request | Rejection)
