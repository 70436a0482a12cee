"""Choice of the compiled program for a step."""

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import Bucket, ProgramKind


def padded_tokens(num_tokens: int, block_tokens: int) -> int:
    """Prefill tokens that a segment takes up in a program: whole query blocks."""
    return -(-num_tokens // block_tokens) * block_tokens


def program_tokens(config: SchedulerConfig, num_prefill_tokens: int) -> int:
    """Prefill tokens of the smallest mixed program that holds so many (padded), or of the largest."""
    return next((tokens for tokens in config.prefill_tokens if num_prefill_tokens <= tokens), config.chunk_tokens)


def pick_bucket(config: SchedulerConfig, num_decode_rows: int, num_prefill_tokens: int) -> Bucket:
    """The smallest program that holds the rows and the (padded) prefill tokens of a lane."""
    if num_prefill_tokens == 0:
        for rows in config.decode_rows:
            if num_decode_rows <= rows:
                return Bucket(ProgramKind.DECODE, rows)
    elif num_decode_rows <= config.num_slots:
        for tokens in config.prefill_tokens:
            if num_prefill_tokens <= tokens:
                return Bucket(ProgramKind.MIXED, config.num_slots, tokens)
    raise InvariantError(f"no program holds {num_decode_rows} decode rows and {num_prefill_tokens} prefill tokens")
