"""When an answer is good enough, by hand; and an interval that is neither too sure nor useless."""

import numpy as np
import pytest

from headrace.serving.bench.objective import Objective, parse_objective, share_interval
from headrace.serving.bench.outcome import Outcome
from headrace.serving.core.errors import ConfigError

GOOD = Outcome(
    index=0, planned_s=10.0, sent_s=10.4, first_s=10.5, last_s=11.5, ended_s=12.0, output_tokens=11, first_tokens=1,
    gaps_ms=(100.0,) * 10, pauses_ms=(50.0,) * 9 + (550.0,),
)  # fmt: skip


def changed(**values: object) -> Outcome:
    names = {name: getattr(GOOD, name) for name in Outcome.__dataclass_fields__}
    return Outcome(**{**names, **values})


@pytest.mark.parametrize(
    ("slo", "missed"),
    [
        ("ttft=500ms", ()),  # from the planned start, though it was sent 400 ms later
        ("ttft=499ms", ("ttft",)),
        ("itl=100ms", ()),  # the mean: 1 s over 10 tokens
        ("itl=99.9ms", ("itl",)),
        ("itl=100ms,itl_p=80", ()),
        ("itl=100ms,itl_p=100", ("itl",)),
        ("itl=0.55s,itl_p=100", ()),
        ("e2e=2s", ()),
        ("ttft=0.1s,itl=1ms,e2e=1.9s", ("ttft", "itl", "e2e")),
    ],
)
def test_what_meets_an_objective(slo: str, missed: tuple[str, ...]) -> None:
    assert parse_objective(slo).missed_by(GOOD) == missed


def test_no_answer_meets_nothing_and_one_piece_has_no_gap() -> None:
    slo = parse_objective("itl=1ms")
    assert slo.missed_by(changed(error="timeout")) == slo.missed_by(changed(is_cancelled=True)) == ("answer",)
    assert slo.missed_by(changed(output_tokens=1, pauses_ms=())) == ()
    assert parse_objective("itl=1ms,itl_p=50").missed_by(changed(pauses_ms=())) == ()
    assert parse_objective("ttft=1s").missed_by(changed(first_s=None)) == ("ttft",)
    # Tokens that came with the first piece had no gap before them.
    assert changed(first_tokens=6).mean_gap_ms == 200


def test_an_objective_in_words() -> None:
    assert parse_objective("ttft=1s, itl=250ms ,itl_p=95,e2e=1.5s") == Objective(
        ttft_ms=1000, itl_ms=250, itl_percentile=95, e2e_ms=1500
    )
    assert str(parse_objective("ttft=1s,itl=250ms,itl_p=95")) == "ttft ≤ 1000 ms, itl(p95) ≤ 250 ms"


@pytest.mark.parametrize(
    ("slo", "says"),
    [
        ("", "'' is not one of ttft, itl, e2e, itl_p"),
        ("tpot=1s", "'tpot' is not one of"),
        ("ttft=1s,ttft=2s", "'ttft' is not one of .* each once"),
        ("ttft=1", "ttft is '1'; write a time with its unit"),
        ("ttft=0ms", "ttft is '0ms'"),
        ("itl_p=95", "give itl, too"),
        ("itl=1s,itl_p=101", "itl_p is '101'"),
        ("itl=1s,itl_p=x", "itl_p is 'x'"),
    ],
)
def test_what_is_no_objective(slo: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"--slo .*{says}"):
        parse_objective(slo)


def test_the_interval_knows_shares_at_the_ends_and_runs_of_bad_ones() -> None:
    assert share_interval([]) == (0.0, 1.0)
    low, high = share_interval([True] * 100)
    assert high == 1.0 and low == pytest.approx(0.963, abs=0.001)  # Wilson's
    mixed = [index % 2 == 0 for index in range(400)]
    runs = [index // 50 % 2 == 0 for index in range(400)]
    assert np.diff(share_interval(mixed))[0] == pytest.approx(0.0975, abs=0.002)
    assert np.diff(share_interval(runs))[0] > 0.2
    for flags in (mixed, runs):
        low, high = share_interval(flags)
        assert low < 0.5 < high


def test_the_interval_holds_the_true_share_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        low, high = share_interval(list(rng.random(150) < 0.8))
        inside += low <= 0.8 <= high
    assert inside >= 182  # 190 expected at 95%, 3 deviations below
