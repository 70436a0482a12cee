"""Which record a server is held against, and what counts as another answer."""

from dataclasses import replace
from typing import Any

import pytest

from headrace.serving.core.contract import Contract
from headrace.serving.core.probe import (
    PROBE_FORMAT,
    UNBOUND_PARTS,
    ProbePrompt,
    ProbeRecord,
    answer_fault,
    choose,
    differs_text,
    record_fault,
    safe_steps,
)

PARTS: dict[str, object] = {"model": "m", "tokenizer": "t", "template": "c", "dtype": "float32", "max_context": 512}
STEP = ((5, -0.1), (6, -2.5), (7, -3.0))
PROMPT = ProbePrompt(name="one", prompt_ids=(1, 2), ids=(5, 6), top=(STEP, ((6, -0.2), (5, -1.0), (9, -4.0))), text="x")


def record(parts: dict[str, object] = PARTS, **changes: Any) -> ProbeRecord:
    made = ProbeRecord(
        format=PROBE_FORMAT,
        fingerprint=Contract(parts, {}).fingerprint,
        contract=parts,
        numerics={},
        tolerance=0.01,
        prompts=(PROMPT,),
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"format": "headrace-probe/2"}, "format"),
        ({"contract": {**PARTS, "model": "n"}}, "changed by hand"),
        ({"contract": {"model": 0.5}}, "canonical form"),
        ({"numerics": {"x": 0.5}}, "canonical form"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"prompts": ()}, "prompts"),
        ({"prompts": (replace(PROMPT, messages=()),)}, "text and messages"),
        ({"prompts": (replace(PROMPT, prompt_ids=()),)}, "prompt_ids"),
        ({"prompts": (replace(PROMPT, ids=(5,)),)}, "top for each"),
        ({"prompts": (replace(PROMPT, top=(STEP, ())),)}, "1 to 8 entries"),
        ({"prompts": (replace(PROMPT, top=(STEP, ((1, float("inf")),))),)}, "finite"),
        ({"prompts": (replace(PROMPT, prompt_ids=(-1,)),)}, "negative"),
    ],
)
def test_records_that_prove_nothing(changes: dict[str, Any], what: str) -> None:
    assert record_fault(record()) is None
    fault = record_fault(record(**changes))
    assert fault is not None and what in fault


def test_a_record_of_the_very_contract_goes_first() -> None:
    own, longer = record(), record({**PARTS, "max_context": 1024})
    assert choose((longer, own), (), Contract(PARTS, {})).record is own
    assert choose((longer,), (), Contract(PARTS, {})).record is longer  # the context changes no answer
    assert choose((), (own,), Contract(PARTS, {})).record is own


def test_a_shipped_record_is_for_the_kind_of_device_that_it_was_made_on() -> None:
    cpu = record(numerics={"device": "cpu:cpu"})
    assert choose((), (cpu,), Contract(PARTS, {"device": "cpu:cpu", "isa": "other"})).record is cpu
    assert choose((), (cpu,), Contract(PARTS, {"device": "tpu:TPU v6 lite"})).record is None
    assert choose((cpu,), (), Contract(PARTS, {"device": "tpu:TPU v6 lite"})).record is cpu


@pytest.mark.parametrize("part", [*sorted(PARTS.keys() - UNBOUND_PARTS), "quantization"])
def test_the_operators_record_names_the_very_part_that_differs(part: str) -> None:
    served = Contract({**PARTS, part: "other"}, {})
    choice = choose((record(),), (record(served.parts),), served)  # type: ignore[arg-type]
    assert choice.record is None and [d.part for d in choice.differs] == [part]
    assert "other" in differs_text(choice.differs)
    assert choose((), (record(),), served).differs == ()  # one that came with us is for another contract: none


def test_the_nearest_record_is_the_one_that_is_told_of() -> None:
    far, near = record({**PARTS, "model": "a", "dtype": "b"}), record({**PARTS, "tokenizer": "b"})
    choice = choose((far, near), (), Contract(PARTS, {}))
    assert choice.nearest is near
    assert differs_text(choice.differs) == "tokenizer differs (recorded b, served t)"


def test_answers_as_recorded() -> None:
    assert answer_fault(PROMPT, PROMPT.ids, PROMPT.top, 0.01) is None
    moved = tuple(tuple((i, v + 0.009) for i, v in step) for step in PROMPT.top)
    assert answer_fault(PROMPT, (*PROMPT.ids, 3), (*moved, STEP), 0.01) is None
    # Two ids near the end of the list may change places, and one of them may leave it.
    swapped = ((*STEP[:2], (8, -2.995)), PROMPT.top[1])
    assert answer_fault(PROMPT, PROMPT.ids, swapped, 0.01) is None


@pytest.mark.parametrize(
    ("ids", "first", "what"),
    [
        ((7, 6), STEP, "ids differ at step 0: 7 instead of 5"),
        ((5, 6), ((5, -0.12), *STEP[1:]), "logits differ at step 0: the logprob of id 5 is 0.02"),
        # The list ends at -2.6, so id 7 at -3.0 may well lie below it; id 6 at -2.5 must not be missing.
        ((5, 6), (STEP[0], (9, -2.55), (8, -2.6)), "logits differ at step 0: the logprob of id 6"),
        ((5, 6), ((5, float("nan")), *STEP[1:]), "no finite logprobs"),
        ((5, 6), (), "no finite logprobs"),
        ((5,), STEP, "ended after 1 of 2"),
    ],
)
def test_other_answers(ids: tuple[int, ...], first: Any, what: str) -> None:
    fault = answer_fault(PROMPT, ids, (first, PROMPT.top[1]), 0.01)
    assert fault is not None and what in fault


def test_recording_stops_before_a_near_tie() -> None:
    clear, tie = ((1, -0.1), (2, -0.5)), ((1, -0.7), (2, -0.72))
    assert safe_steps((clear, clear), 0.01) == 2
    assert safe_steps((clear, tie, clear), 0.01) == 1
    assert safe_steps((tie,), 0.001) == 1
    assert safe_steps((((1, 0.0),),), 0.01) == 0
