import pytest

from headrace.serving.core.plan import (
    Bucket,
    DecodeRow,
    PrefillSegment,
    ProgramKind,
    SampledToken,
    SlotLoad,
    SlotRef,
    StepPlan,
)
from headrace.serving.core.request import Request, RequestId
from headrace.serving.engine.fake_runner import FakeRunner, WrongKV, expected_tokens, extend_history
from headrace.serving.engine.ports import Runner
from tests.serving.core.driver import VOCAB, make_config, make_request

CONFIG = make_config()
SLOT = SlotRef(0, 1)
MIXED = Bucket(ProgramKind.MIXED, 4, 16)
DECODE = Bucket(ProgramKind.DECODE, 1)


def load(request: Request, *outputs: int) -> SlotLoad:
    return SlotLoad(slot=SLOT, request=request, output_ids=outputs)


def segment(request: Request, start: int = 0, end: int | None = None, **changes: object) -> PrefillSegment:
    last = len(request.prompt_ids)
    end = last if end is None else end
    values = {
        "slot": SLOT,
        "start": start,
        "token_ids": request.prompt_ids[start:end],
        "page_ids": tuple(range(1, 1 + -(-end // 4))),
        "samples": end == last,
        "output_index": 0,
    }
    return PrefillSegment(**(values | changes))  # type: ignore[arg-type]


def row(position: int, **changes: object) -> DecodeRow:
    values = {
        "slot": SLOT,
        "position": position,
        "input_token": None,
        "page_ids": tuple(range(1, 2 + position // 4)),
        "output_index": 1,
    }
    return DecodeRow(**(values | changes))  # type: ignore[arg-type]


def run(runner: FakeRunner, *parts: SlotLoad | DecodeRow | PrefillSegment, bucket: Bucket | None = None) -> list[int]:
    """Token ids of one step, decode rows first."""
    decode = tuple(p for p in parts if isinstance(p, DecodeRow))
    prefill = tuple(p for p in parts if isinstance(p, PrefillSegment))
    plan = StepPlan(
        step_id=0,
        bucket=bucket or (MIXED if prefill else DECODE),
        loads=tuple(p for p in parts if isinstance(p, SlotLoad)),
        decode=decode,
        prefill=prefill,
    )
    result = runner.collect(runner.dispatch(plan))
    return [s.token_id for s in (*result.decode, *result.prefill) if s is not None]


def test_tokens_can_be_computed_by_hand() -> None:
    """((1 * 1_000_003) + 2 + 1) = 1_000_006 after prompt (0, 2): 1_000_006 + seed 5 = 1_000_011, mod 64 = 11."""
    assert extend_history(extend_history(0, 0), 2) == 1_000_006
    request = make_request(1, (0, 2), 1, seed=5)
    assert [token.token_id for token in expected_tokens(request, 64)] == [11]


def test_prefill_and_decode_give_the_expected_tokens() -> None:
    request = make_request(1, 6, 3)
    runner: Runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    assert isinstance(runner, FakeRunner)
    tokens = run(runner, load(request), segment(request))
    tokens += run(runner, row(6)) + run(runner, row(7, output_index=2))
    assert tokens == [token.token_id for token in expected_tokens(request, VOCAB)]


def test_a_recomputed_request_goes_on_where_it_was() -> None:
    request = make_request(1, 6, 3, presence_penalty=1.0)
    expected = [token.token_id for token in expected_tokens(request, VOCAB)]
    again = make_request(1, request.prompt_ids + tuple(expected[:2]))
    runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    assert run(runner, load(request, *expected[:2]), segment(again, output_index=2)) == expected[2:]


def test_sampling_parameters_that_have_an_effect() -> None:
    plain = make_request(1, 6, 8)
    tokens = [t.token_id for t in expected_tokens(plain, VOCAB)]
    assert tokens != [t.token_id for t in expected_tokens(make_request(1, 6, 8, seed=1), VOCAB)]
    penalized = expected_tokens(make_request(1, 6, 8, presence_penalty=1.0), VOCAB)
    assert penalized[0].token_id == tokens[0] and penalized[1].token_id != tokens[1]
    allowed = expected_tokens(make_request(1, 6, 8, allowed_token_ids=(3, 35)), VOCAB)
    assert {t.token_id for t in allowed} == {3, 35}
    held = expected_tokens(make_request(1, 6, 8, allowed_token_ids=(3, 35), min_tokens=2, stop_ids=(35,)), VOCAB)
    assert [t.token_id for t in held[:2]] == [3, 3] and held[-1].token_id == 35
    assert plain.cache_namespace == b""
    assert tokens != [t.token_id for t in expected_tokens(make_request(1, 6, 8, namespace=b"x" * 32), VOCAB)]
    logprobs = expected_tokens(make_request(1, 6, 1, num_logprobs=2), VOCAB)[0].logprobs
    assert logprobs is not None
    assert logprobs.top[0] == (tokens[0], logprobs.chosen) and logprobs.top[0][1] > logprobs.top[1][1]
    with pytest.raises(ValueError, match="no token"):
        expected_tokens(make_request(1, 6, 8, allowed_token_ids=(35,), min_tokens=1, stop_ids=(35,)), VOCAB)


REQUEST = make_request(1, 6, 8)
EIGHT = make_request(1, 8, 8)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((row(6, slot=SlotRef(0, 2)),), "was not loaded"),
        ((row(6, slot=SlotRef(1, 1)),), "was not loaded"),
        ((row(7, page_ids=(1, 2)),), "position 7"),
        ((row(6, input_token=63),), "differs from the device's"),
        ((row(6, output_index=2),), "output_index 2"),
        ((row(6, page_ids=(1,)),), "does not cover"),
        ((row(6, page_ids=(1, 0)),), "does not cover"),
        ((row(6, page_ids=(1, 1)),), "does not cover"),
        ((row(6, page_ids=(2, 1)),), "page 2 does not hold"),
        ((row(6, page_ids=(1, 3)),), "page 3 does not hold"),
        ((row(6), row(6)), "a slot twice"),
        ((segment(make_request(2, 6)),), "not the request's"),
        ((load(EIGHT), segment(EIGHT, samples=False)), "must come from the last"),
        ((load(REQUEST), segment(REQUEST, 0, 4, samples=True)), "must come from the last"),
        ((load(REQUEST), segment(REQUEST, 2)), "page boundaries"),
        ((load(REQUEST), segment(REQUEST, 0, 3)), "page boundaries"),
        ((load(REQUEST), segment(REQUEST, 4, page_ids=(7, 8))), "page 7 does not hold"),
    ],
)
def test_wrong_use_of_memory_raises(parts: tuple[SlotLoad | DecodeRow | PrefillSegment, ...], text: str) -> None:
    runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    run(runner, load(REQUEST), segment(REQUEST))
    bucket = Bucket(ProgramKind.DECODE, 4) if len(parts) == 2 and isinstance(parts[0], DecodeRow) else None
    if isinstance(parts[-1], PrefillSegment) and len(parts[-1].token_ids) <= 4:
        bucket = Bucket(ProgramKind.MIXED, 4, 4)
    with pytest.raises(WrongKV, match=text):
        run(runner, *parts, bucket=bucket)


def test_a_wrong_program_is_refused() -> None:
    runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    with pytest.raises(WrongKV, match="wrong program"):
        run(runner, load(REQUEST), segment(REQUEST), bucket=Bucket(ProgramKind.MIXED, 4, 4))


def test_a_poisoned_page_is_noticed() -> None:
    runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    run(runner, load(REQUEST), segment(REQUEST))
    runner.poison(1)
    with pytest.raises(WrongKV, match="page 1 does not hold"):
        run(runner, row(6))


def test_tickets_are_bounded_and_collected_in_order() -> None:
    runner = FakeRunner(CONFIG, vocab_size=VOCAB)
    plans = [
        StepPlan(step_id=i, bucket=DECODE, loads=(), decode=(row(6 + i, output_index=1 + i),), prefill=())
        for i in range(3)
    ]
    run(runner, load(REQUEST), segment(REQUEST))
    first, second = runner.dispatch(plans[0]), runner.dispatch(plans[1])
    assert (first.step_id, second.step_id) == (0, 1)
    with pytest.raises(WrongKV, match="in flight"):
        runner.dispatch(plans[2])
    with pytest.raises(WrongKV, match="dispatch order"):
        runner.collect(second)
    assert runner.collect(first).step_id == 0
    assert runner.collect(second).decode[0].is_finite
    with pytest.raises(WrongKV, match="dispatch order"):
        runner.collect(second)


def test_the_device_works_at_collect_and_may_fail_there() -> None:
    seen: list[int] = []
    runner = FakeRunner(CONFIG, vocab_size=VOCAB, on_collect=lambda plan: seen.append(plan.step_id))
    plan = StepPlan(step_id=9, bucket=MIXED, loads=(load(REQUEST),), decode=(), prefill=(segment(REQUEST),))
    ticket = runner.dispatch(plan)
    assert seen == []
    runner.collect(ticket)
    assert seen == [9]

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("device lost")

    broken = FakeRunner(CONFIG, vocab_size=VOCAB, on_collect=fail)
    with pytest.raises(RuntimeError, match="device lost"):
        broken.collect(broken.dispatch(plan))


def test_logits_can_be_made_not_finite() -> None:
    runner = FakeRunner(CONFIG, vocab_size=VOCAB, non_finite=frozenset({(RequestId(1), 0)}))
    plan = StepPlan(step_id=0, bucket=MIXED, loads=(load(REQUEST),), decode=(), prefill=(segment(REQUEST),))
    assert runner.collect(runner.dispatch(plan)).prefill == (SampledToken(token_id=0, is_finite=False),)


def test_warm_up_names_every_program() -> None:
    seen: list[tuple[str, int, int]] = []
    runner = FakeRunner(CONFIG)
    programs = runner.warm_up(lambda *what: seen.append(what))
    assert [p.name for p in programs] == ["decode-1x0", "decode-4x0", "mixed-4x4", "mixed-4x16"]
    assert seen[-1] == ("mixed-4x16", 3, 4)
    assert runner.compiles_after_ready() == 0
