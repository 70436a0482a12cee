"""What hosts tell each other: what differs, by name; addresses; plans that come out as they went in."""

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
    RunStep,
    Tensor,
    ToFollower,
    first_difference,
    first_different_tensor,
    format_address,
    parse_address,
)
from headrace.serving.engine.link import HEADER_BYTES, encode_frame

MINE: tuple[Tensor, ...] = (("a", "F32", (2, 3), "00"), ("b", "F32", (4,), "11"))


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
        ((MINE[0], ("b", "F32", (4,), "12")), "tensor b has another content"),
        ((("a", "BF16", (2, 3), "00"), MINE[1]), "tensor a has another type: BF16, and F32 on rank 0"),
        ((("a", "F32", (3, 2), "01"), MINE[1]), "tensor a has another shape: (3, 2), and (2, 3) on rank 0"),
        (MINE[:1], "only rank 0 has tensor b"),
        ((*MINE, ("c", "F32", (1,), "22")), "it has a tensor c, which rank 0 has not"),
    ],
)
def test_the_first_tensor_that_differs_is_named(theirs: tuple[Tensor, ...], says: str | None) -> None:
    assert first_different_tensor(MINE, theirs) == says


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
