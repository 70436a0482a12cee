import pytest

from headrace.serving.core.buckets import padded_tokens, pick_bucket
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import Bucket, ProgramKind
from tests.serving.core.driver import make_config

CONFIG = make_config(num_slots=8, decode_rows=(1, 4, 8), chunk_tokens=32, prefill_tokens=(8, 32))


@pytest.mark.parametrize(("tokens", "padded"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_segments_are_padded_to_whole_blocks(tokens: int, padded: int) -> None:
    assert padded_tokens(tokens, 4) == padded


@pytest.mark.parametrize(
    ("rows", "tokens", "bucket"),
    [
        (1, 0, Bucket(ProgramKind.DECODE, 1)),
        (2, 0, Bucket(ProgramKind.DECODE, 4)),
        (8, 0, Bucket(ProgramKind.DECODE, 8)),
        (0, 4, Bucket(ProgramKind.MIXED, 8, 8)),
        (8, 8, Bucket(ProgramKind.MIXED, 8, 8)),
        (3, 12, Bucket(ProgramKind.MIXED, 8, 32)),
    ],
)
def test_the_smallest_program_that_holds_the_step_is_picked(rows: int, tokens: int, bucket: Bucket) -> None:
    assert pick_bucket(CONFIG, rows, tokens) == bucket
    assert bucket in CONFIG.buckets, "warm-up compiles it"


@pytest.mark.parametrize(("rows", "tokens"), [(9, 0), (9, 4), (1, 33)])
def test_a_step_beyond_every_program_is_a_bug(rows: int, tokens: int) -> None:
    with pytest.raises(InvariantError, match="no program"):
        pick_bucket(CONFIG, rows, tokens)
