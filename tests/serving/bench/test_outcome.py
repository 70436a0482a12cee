"""Figures from outcomes, by hand."""

import pytest

from headrace.serving.bench.outcome import (
    MAX_ERROR_TYPES,
    Outcome,
    clean_code,
    clean_id,
    gaps_of,
    is_refusal,
    pauses_of,
    server_times,
    spread,
    summarize,
)
from headrace.serving.bench.targets import Terms


def test_a_piece_of_several_tokens_counts_as_as_many_gaps() -> None:
    assert gaps_of([1.0, 1.5, 2.1], [2, 1, 3]) == pytest.approx((500, 200, 200, 200))
    assert gaps_of([1.0], [4]) == gaps_of([], []) == ()


def test_percentiles_lie_between_values() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {
        "count": 5, "mean_ms": 3.0, "p50_ms": 3.0, "p95_ms": 4.8, "p99_ms": 4.96,
    }  # fmt: skip
    assert spread([]) == {"count": 0, "mean_ms": None, "p50_ms": None, "p95_ms": None, "p99_ms": None}


def test_failures_count_in_no_rate() -> None:
    good = Outcome(
        index=0,
        sent_s=10.0,
        first_s=10.5,
        ended_s=12.0,
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=4,
        gaps_ms=(500.0,) * 3,
    )
    bad = Outcome(index=1, sent_s=11.0, first_s=11.1, ended_s=14.0, error="timeout", output_tokens=99, gaps_ms=(9.0,))
    found = summarize([bad, good])
    assert (found["requests"], found["failed"], found["errors"]) == (2, 1, {"timeout": 1})
    assert (found["seconds"], found["output_tokens"], found["output_tokens_per_s"]) == (4.0, 4, 1.0)
    assert (found["prompt_tokens"], found["cached_tokens"], found["requests_per_s"]) == (7, 2, 0.25)
    assert found["first_token"] == spread([500.0])
    assert found["inter_token"] == spread([500.0] * 3)
    assert found["whole_answer"] == spread([2000.0])


def test_error_types_are_bounded() -> None:
    outcomes = [Outcome(index=i, sent_s=0.0, ended_s=1.0, error=f"made_up_{i}") for i in range(MAX_ERROR_TYPES + 5)]
    errors = summarize([*outcomes, *outcomes[:1]])["errors"]
    assert isinstance(errors, dict)
    assert len(errors) == MAX_ERROR_TYPES + 1
    assert (errors["made_up_0"], errors["other"]) == (2, 5)
    assert clean_code("a b\nc" + "x" * 500) == "a_b_c" + "x" * 59
    assert clean_code("") == "unnamed"


def test_nothing_at_all_is_no_division_by_zero() -> None:
    assert summarize([])["output_tokens_per_s"] == 0.0


@pytest.mark.parametrize(
    ("code", "kind", "status", "refused"),
    [
        ("queue_full", "overloaded", 429, True),
        ("queue_full", "overloaded", None, True),
        ("context_exceeded", "invalid_request_error", 400, True),
        ("http_503", None, 503, True),
        ("internal_error", "server_error", 500, False),
        ("internal_error", "server_error", None, False),
        ("http_502", None, 502, False),
        ("engine_lost", "service_unavailable", 503, False),
        ("deadline_exceeded", "overloaded", None, False),
        (None, None, None, False),
    ],
)
def test_what_a_refusal_is(code: str | None, kind: str | None, status: int | None, refused: bool) -> None:
    assert is_refusal(code, kind, status) is refused


def test_what_a_server_says_of_a_request_is_bounded_and_of_numbers() -> None:
    preempted = [{"reason": "pages", "action": "swapped", "count": 2}, "x"]
    said = {"queue_ms": 1.5, "x y": 2, "flag": True, "text": "t", "bad": float("inf"), "preempted": preempted}
    assert server_times(said) == {"queue_ms": 1.5, "x_y": 2, "preempted_pages_swapped": 2}
    assert len(server_times({f"n{number}": number for number in range(99)})) == 32
    assert server_times(None) == server_times([1]) == {}
    assert clean_id("req_1\n") == "req_1_" and clean_id("") is None and clean_id(7) is None


def test_pauses_are_between_pieces() -> None:
    assert pauses_of([1.0, 1.5, 2.1]) == pytest.approx((500, 600))


def test_terms_are_told_each_door_in_its_own_way() -> None:
    named, number = Terms(priority="high", deadline_ms=9), Terms(priority=2)
    assert named.envelope == {"priority": "high", "deadline_ms": 9} and named.body_fields == {}
    assert named.headers == {"x-headrace-deadline-ms": "9", "x-headrace-priority": "high"}
    assert (number.envelope, number.headers, number.body_fields) == ({"priority": 2}, {}, {"priority": 2})
