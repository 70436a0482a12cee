"""What hosts tell each other: what differs, by name; addresses; plans that come out as they went in."""

from dataclasses import replace

import msgspec
import pytest

from headrace.serving.core.plan import (
    Bucket,
    DecodeRow,
    PrefillSegment,
    ProgramKind,
    SlotLoad,
    SlotRef,
    StepPlan,
)
from headrace.serving.core.request import Request, RequestId, SamplingParams, StopRule
from headrace.serving.engine.host_messages import (
    Loaded,
    RunStep,
    ToFollower,
    first_difference,
    format_address,
    parse_address,
    what_differs,
)
from headrace.serving.engine.link import HEADER_BYTES, encode_frame

MINE = Loaded(facts={"the device": "tpu"}, model_hash="f0", digests={"a": "00", "b": "11"}, num_pages=9)


def plan_of(rows: int, prompt_tokens: int) -> StepPlan:
    sampling = SamplingParams(temperature=0.7, logit_bias=((5, -1.5),), allowed_token_ids=(1, 5), seed=2**63 - 1)
    request = Request(
        request_id=RequestId(9),
        prompt_ids=tuple(range(prompt_tokens)),
        sampling=sampling,
        stop=StopRule(max_tokens=5, min_tokens=1, stop_token_ids=(2,)),
        cache_namespace=bytes(range(32)),
        tenant="someone",
    )
    pages = tuple(range(1, 129))
    return StepPlan(
        step_id=7,
        bucket=Bucket(ProgramKind.MIXED, rows, 64),
        loads=(SlotLoad(slot=SlotRef(3, 2), request=request, output_ids=(4, 5)),),
        decode=tuple(
            DecodeRow(slot=SlotRef(i, 1), position=99, input_token=None, page_ids=pages, output_index=3)
            for i in range(rows)
        ),
        prefill=(
            PrefillSegment(
                slot=SlotRef(3, 2), start=0, token_ids=tuple(range(64)), page_ids=(9, 8), samples=True, output_index=0
            ),
        ),
    )


def test_a_plan_comes_out_as_it_went_in_and_is_small() -> None:
    frame = encode_frame(RunStep(plan_of(16, 1000)))
    decoded = msgspec.msgpack.Decoder(ToFollower).decode(frame[HEADER_BYTES:])
    assert decoded == RunStep(plan_of(16, 1000))
    assert len(frame) < 16_000, "16 sequences of 128 pages, and a prompt of 1,000 tokens"


def test_the_first_difference_is_named_with_both_values() -> None:
    assert first_difference({"--dtype": "float32"}, {"--dtype": "float32"}) is None
    differing = first_difference({"--dtype": "x", "--mesh": "tensor=2"}, {"--dtype": "x", "--mesh": "tensor=4"})
    assert differing == "--mesh is tensor=4, and tensor=2 on rank 0"
    assert first_difference({"--mesh": "x"}, {}) == "--mesh is absent, and x on rank 0"


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (MINE, None),
        (replace(MINE, digests={"a": "00", "b": "12"}, model_hash="f1"), "tensor b has other bytes"),
        (replace(MINE, digests={"a": "00"}), "only rank 0 has tensor b"),
        (replace(MINE, digests={"a": "00", "b": "11", "c": "22"}), "rank 0 has no tensor c"),
        (replace(MINE, model_hash="f1"), "the model's hash is f1, and f0 on rank 0"),
        (replace(MINE, facts={"the device": "cpu"}), "the device is cpu, and tpu on rank 0"),
        (replace(MINE, num_pages=3), None),
    ],
)
def test_the_first_part_that_differs_is_named(theirs: Loaded, says: str | None) -> None:
    assert what_differs(MINE, theirs) == says


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:8471", "10.0.0.1", 8471), ("[::1]:1", "::1", 1), ("node-0:65535", "node-0", 65535)],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", ":80", "host:", "host:0", "host:65536", "host:x", "::1:80", "host:８０"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        parse_address(text)
