"""No field of a plan may be left out of its digest, also none that is added later."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest

from headrace.serving.core.plan import (
    Bucket,
    DecodeRow,
    PageCopy,
    PrefillSegment,
    ProgramKind,
    SlotLoad,
    SlotRef,
    StepPlan,
)
from headrace.serving.core.plan_digest import RENAMED, Renaming, both_digests, field_digests, plan_digest
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.fake_runner import FakeRunner
from tests.serving.core.driver import VOCAB, make_config, make_request

REQUEST = Request(
    request_id=RequestId(7),
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(logit_bias=((1, 0.5),), allowed_token_ids=(1, 2), num_logprobs=3),
    stop=StopRule(max_tokens=5, stop_token_ids=(9,)),
    cache_namespace=b"n",
    tenant="t",
)
PLAN = StepPlan(
    step_id=3,
    bucket=Bucket(ProgramKind.MIXED, 4, 16),
    loads=(SlotLoad(slot=SlotRef(1, 2), request=REQUEST, output_ids=(4,)),),
    decode=(DecodeRow(slot=SlotRef(0, 1), position=5, input_token=3, page_ids=(1, 2), output_index=1),),
    prefill=(
        PrefillSegment(slot=SlotRef(1, 2), start=0, token_ids=(1, 2, 3), page_ids=(3,), samples=True, output_index=1),
    ),
    swap_out=(PageCopy(5, 0),),
    swap_in=(PageCopy(6, 1),),
)
KINDS = (StepPlan, Bucket, SlotRef, SlotLoad, DecodeRow, PrefillSegment, PageCopy, Request, SamplingParams, StopRule)
KEPT = {
    "bucket",
    "loads",
    "decode",
    "prefill",
    "swap_out",
    "swap_in",
    "kind",
    "decode_rows",
    "prefill_tokens",
    "slot",
    "generation",
    "request",
    "output_ids",
    "position",
    "input_token",
    "output_index",
    "start",
    "token_ids",
    "samples",
    "prompt_ids",
    "sampling",
    "stop",
    "weight",
    "priority",
    "deadline_ms",
    "shared_prefix_tokens",
    "shared_namespace",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "num_logprobs",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
}
"""Fields that say the same in every run; a new one belongs here or to what Renaming renames."""


def another(value: Any) -> Any:
    """Of the same kind, but different."""
    match value:
        case Enum():
            return next(member for member in type(value) if member is not value)
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case bytes():
            return value + b"x"
        case None:
            return 1
        case tuple():
            return (*value, value[0] if value else 1)
    raise AssertionError(f"a plan holds a {type(value).__name__}: say here how it can differ")


def changes(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The value again and again, each time with one field of one dataclass in it changed."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            inner = getattr(value, field.name)
            for name, changed in changes(inner, f"{path}.{field.name}"):
                yield name, replace(value, **{field.name: changed})
        return
    if isinstance(value, tuple):
        for index, inner in enumerate(value):
            if is_dataclass(inner):
                for name, changed in changes(inner, f"{path}[{index}]"):
                    yield name, (*value[:index], changed, *value[index + 1 :])
    yield path, another(value)


CHANGES = dict(changes(PLAN, "plan"))


@pytest.mark.parametrize("path", CHANGES)
def test_each_field_changes_the_digest(path: str) -> None:
    changed = CHANGES[path]
    assert plan_digest(changed) != plan_digest(PLAN)
    field = path.split(".")[1].partition("[")[0]
    differing = [name for name, value in field_digests(changed).items() if value != field_digests(PLAN)[name]]
    assert differing == [field]


def test_all_fields_are_in_the_example_and_renamed_or_kept() -> None:
    seen = {part.partition("[")[0] for path in CHANGES for part in path.split(".")}
    names = {field.name for kind in KINDS for field in fields(kind)}
    assert names <= seen
    assert names == KEPT | RENAMED | {"page_ids", "page", "host_page"}


def test_an_equal_plan_has_an_equal_digest_and_both_digests_agree() -> None:
    twin = replace(PLAN, decode=tuple(replace(row) for row in PLAN.decode))
    assert twin is not PLAN and plan_digest(twin) == plan_digest(PLAN)
    assert both_digests(PLAN) == (plan_digest(PLAN), field_digests(PLAN))
    assert len(plan_digest(PLAN)) == 32


def test_integers_beyond_64_bits_and_tuples_of_pairs_have_a_form() -> None:
    sampling = replace(REQUEST.sampling, seed=2**63 - 1, logit_bias=((2**64, 1.0),))
    request = replace(REQUEST, sampling=sampling, prompt_ids=(2**64,))
    assert plan_digest(replace(PLAN, loads=(replace(PLAN.loads[0], request=request),))) != plan_digest(PLAN)


def test_a_type_without_a_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="a list has no"):
        plan_digest(replace(PLAN, decode=([1],)))  # type: ignore[arg-type]


# Renaming


CONFIG = make_config(max_steps_in_flight=1)
PROMPT = tuple(range(1, 24))


class Server:
    """One step in flight, one request after the other."""

    def __init__(self) -> None:
        self._scheduler, self._runner = Scheduler(CONFIG), FakeRunner(CONFIG, vocab_size=VOCAB)

    def plans(self, *requests: Request) -> list[StepPlan]:
        made = []
        for request in requests:
            assert self._scheduler.submit(request, 0.0) is None
            while (plan := self._scheduler.plan_step(0.0)) is not None:
                self._scheduler.apply_result(plan, self._runner.collect(self._runner.dispatch(plan)), 0.0)
                made.append(plan)
        return made


def digests(plans: list[StepPlan]) -> list[bytes]:
    renaming = Renaming(CONFIG.page_size)
    return [renaming.digest(plan) for plan in plans]


def request_of(number: int, tenant: str) -> Request:
    namespace = tenant.encode().ljust(32, b"-")
    return replace(make_request(number, PROMPT, 6, namespace=namespace), tenant=tenant)


def test_another_tenants_plans_are_those_of_a_cold_server() -> None:
    cold = Server().plans(request_of(1, "b"), request_of(2, "b"))
    warm = Server()
    warm.plans(request_of(1, "a"), make_request(8, 60, 9))
    other = warm.plans(request_of(10, "b"), request_of(11, "b"))
    assert [plan_digest(p) for p in cold] != [plan_digest(p) for p in other]
    assert digests(cold) == digests(other)


def test_reuse_of_a_prefix_shows() -> None:
    """The control: inside a tenant the second run of a prompt has other plans."""
    warm = Server()
    cold = warm.plans(request_of(1, "a"))
    assert digests(warm.plans(request_of(2, "a"))) != digests(cold)


def test_a_shared_page_has_one_name_and_a_private_one_another() -> None:
    def decode(*page_ids: int) -> StepPlan:
        rows = tuple(
            DecodeRow(slot=SlotRef(i, 1), position=5, input_token=1, page_ids=(page, 8 + i), output_index=0)
            for i, page in enumerate(page_ids)
        )
        return replace(PLAN, loads=(), prefill=(), decode=rows, swap_out=(), swap_in=())

    assert digests([decode(1, 1)]) == digests([decode(5, 5)])
    assert digests([decode(1, 2)]) == digests([decode(6, 5)])
    assert digests([decode(1, 1)]) != digests([decode(1, 2)])


def test_pages_that_went_to_the_host_and_back_keep_their_order_of_names() -> None:
    """A page is written anew in the step that swaps it out: the copy is of what it held before."""

    def digests_with(first: int, second: int, host: int, back_from: int) -> list[bytes]:
        row = replace(PLAN.decode[0], position=0, page_ids=(first,))
        held = replace(PLAN, loads=(), prefill=(), decode=(row,), swap_out=(), swap_in=())
        out = replace(held, swap_out=(PageCopy(first, host),))
        row = replace(row, position=1, page_ids=(second,))
        return digests([held, out, replace(held, decode=(row,), swap_in=(PageCopy(second, back_from),))])

    assert digests_with(4, 9, 0, 0) == digests_with(7, 3, 12, 12)
    assert digests_with(4, 9, 0, 0) != digests_with(4, 9, 0, 1)
