"""A plan as one packed array, a row for each lane: host to device in a single transfer, cut into fields inside the
program.

Every index is checked here, against the pool, the slots and the bucket. XLA clamps an index out of range on reads and
drops it on writes, so a bad one would be a wrong answer and not a crash.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from headrace.pallas_kernels.types import AttnMeta
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import Bucket, DecodeRow, PrefillSegment, SlotRef, StepPlan


@struct.dataclass
class Fields:
    """What a step's program reads of the host's plan for one lane; all i32. B decode rows, then Q prefill segments make
    Z sequences; the prefill tokens T lie in J query blocks.

    token_B: id to feed where is_given_B, else the slot's last sampled id. slot_Z: num_slots (the null slot) for padding
    rows and for segments that do not sample. kv_len_Z: tokens of the sequence with this step's, 0 for padding.
    holds_stops_Z: 1 where min_tokens is not reached. last_Q: index in token_T of the segment's last token.
    """

    token_B: jax.Array
    is_given_B: jax.Array
    slot_Z: jax.Array
    kv_len_Z: jax.Array
    holds_stops_Z: jax.Array
    page_table_ZM: jax.Array
    token_T: jax.Array
    blk_seq_J: jax.Array
    blk_pos_J: jax.Array
    blk_len_J: jax.Array
    last_Q: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """array: i32, of the layout's shape. rows: of the step's result, of each decode row and then each segment in the
    order of the plan."""

    array: np.ndarray
    rows: tuple[int, ...]


class InputLayout:
    """Where each field of one bucket's inputs lies in the packed array."""

    def __init__(self, bucket: Bucket, config: SchedulerConfig, vocab_size: int) -> None:
        self.bucket = bucket
        self.config = config
        self.vocab_size = vocab_size
        self.rows = bucket.decode_rows
        self.segments = config.max_segments if bucket.prefill_tokens else 0
        self.blocks = bucket.prefill_tokens // config.block_tokens
        self.max_pages = config.max_pages_per_sequence
        sequences = self.rows + self.segments
        self._shapes = {
            "token_B": (self.rows,),
            "is_given_B": (self.rows,),
            "slot_Z": (sequences,),
            "kv_len_Z": (sequences,),
            "holds_stops_Z": (sequences,),
            "page_table_ZM": (sequences, self.max_pages),
            "token_T": (bucket.prefill_tokens,),
            "blk_seq_J": (self.blocks,),
            "blk_pos_J": (self.blocks,),
            "blk_len_J": (self.blocks,),
            "last_Q": (self.segments,),
        }
        self.results = sequences
        """Rows of a lane's result."""
        self.shape = (config.num_lanes, sum(math.prod(shape) for shape in self._shapes.values()))

    @functools.cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        ranges, start = {}, 0
        for name, shape in self._shapes.items():
            ranges[name] = (start, start + math.prod(shape))
            start += math.prod(shape)
        return ranges

    def unpack(self, packed: jax.Array) -> Fields:
        """Inside a program: static slices of a lane's row."""
        return Fields(**{n: packed[a:b].reshape(self._shapes[n]) for n, (a, b) in self._ranges.items()})

    def meta(self, fields: Fields) -> AttnMeta:
        """Inside a program: what attention reads. Padding rows are at position 0 of the null page."""
        return AttnMeta(
            position_B=jnp.maximum(fields.kv_len_Z[: self.rows] - 1, 0),
            page_table_ZM=fields.page_table_ZM,
            kv_len_Z=fields.kv_len_Z,
            blk_seq_J=fields.blk_seq_J,
            blk_pos_J=fields.blk_pos_J,
            blk_len_J=fields.blk_len_J,
        )

    def empty(self) -> np.ndarray:
        """A step of padding only. A new array each time: the device may read it after dispatch returned."""
        array = np.zeros(self.shape, np.int32)
        for lane in array:
            view = self._view(lane)
            view["slot_Z"][:] = self.config.num_slots
            view["blk_seq_J"][:] = self.rows
        return array

    def pack(self, plan: StepPlan, min_tokens: dict[int, int]) -> Packed:
        """Check and pack a plan of this bucket.

        min_tokens: by slot, of its tenant. Decode rows are sorted by length, longest first: attention runs groups of
        neighbours to the length of their longest. Raises: InvariantError naming the row and what is out of range.
        """
        array = self.empty()
        written: list[int] = []
        rows: dict[SlotRef, int] = {}
        for lane in range(self.config.num_lanes):
            self._pack_lane(array[lane], lane, plan, min_tokens, written, rows)
        if len(set(written)) != len(written):
            raise InvariantError(f"step {plan.step_id}: two rows write to one page")
        slots = [row.slot for row in (*plan.decode, *plan.prefill)]
        if len({ref.slot for ref in slots}) != len(slots):
            raise InvariantError(f"step {plan.step_id}: a slot has two rows")
        if len(rows) != len(slots):
            raise InvariantError(f"step {plan.step_id}: a slot is out of range")
        return Packed(array=array, rows=tuple(rows[ref] for ref in slots))

    def _pack_lane(
        self,
        array: np.ndarray,
        lane: int,
        plan: StepPlan,
        min_tokens: dict[int, int],
        written: list[int],
        rows: dict[SlotRef, int],
    ) -> None:
        """The part of a plan that is in a lane; rows gets the row of the result for each slot."""
        decode = [row for row in plan.decode if self.config.lane_of_slot(row.slot.slot) == lane]
        prefill = [segment for segment in plan.prefill if self.config.lane_of_slot(segment.slot.slot) == lane]
        if len(decode) > self.rows or len(prefill) > self.segments:
            raise InvariantError(
                f"step {plan.step_id}: {len(decode)} decode rows and {len(prefill)} segments do not fit "
                f"{self.bucket} with {self.segments} segments"
            )
        view = self._view(array)
        first_row = lane * self.results
        for row, of in enumerate(sorted(decode, key=lambda of: -of.position)):
            self._pack_row(view, row, of, min_tokens, written)
            rows[of.slot] = first_row + row
        first_block = 0
        for index, segment in enumerate(prefill):
            first_block = self._pack_segment(view, index, first_block, segment, min_tokens, written)
            rows[segment.slot] = first_row + self.rows + index

    def _view(self, array: np.ndarray) -> dict[str, np.ndarray]:
        return {n: array[a:b].reshape(self._shapes[n]) for n, (a, b) in self._ranges.items()}

    def _pack_row(
        self, view: dict[str, np.ndarray], row: int, plan: DecodeRow, min_tokens: dict[int, int], written: list[int]
    ) -> None:
        where = f"decode row of {plan.slot}"
        if plan.input_token is not None:
            self._need(0 <= plan.input_token < self.vocab_size, f"{where}: token {plan.input_token}")
            view["token_B"][row] = plan.input_token
            view["is_given_B"][row] = 1
        self._pack_sequence(view, row, plan, plan.position + 1, min_tokens, samples=True, where=where)
        written.append(plan.page_ids[plan.position // self.config.page_size])

    def _pack_segment(
        self,
        view: dict[str, np.ndarray],
        index: int,
        first_block: int,
        plan: PrefillSegment,
        min_tokens: dict[int, int],
        written: list[int],
    ) -> int:
        where = f"prefill segment of {plan.slot}"
        block, page_size = self.config.block_tokens, self.config.page_size
        count = len(plan.token_ids)
        last_block = first_block + -(-count // block)
        self._need(count > 0 and last_block <= self.blocks, f"{where}: {count} tokens at block {first_block}")
        self._need(plan.start % page_size == 0, f"{where}: start {plan.start} in a page")
        self._need(plan.samples or count % page_size == 0, f"{where}: {count} tokens, no whole pages before the end")
        token_ids = np.array(plan.token_ids, np.int64)
        self._need(token_ids.min() >= 0 and token_ids.max() < self.vocab_size, f"{where}: a token id")
        end = plan.start + count
        self._pack_sequence(view, self.rows + index, plan, end, min_tokens, samples=plan.samples, where=where)
        written.extend(plan.page_ids[plan.start // page_size : -(-end // page_size)])
        start_token = first_block * block
        view["token_T"][start_token : start_token + count] = token_ids
        view["last_Q"][index] = start_token + count - 1
        offset = np.arange(0, count, block)
        view["blk_seq_J"][first_block:last_block] = self.rows + index
        view["blk_pos_J"][first_block:last_block] = plan.start + offset
        view["blk_len_J"][first_block:last_block] = np.minimum(count - offset, block)
        return last_block

    def _pack_sequence(
        self,
        view: dict[str, np.ndarray],
        index: int,
        plan: DecodeRow | PrefillSegment,
        kv_len: int,
        min_tokens: dict[int, int],
        *,
        samples: bool,
        where: str,
    ) -> None:
        config = self.config
        lane, slot = divmod(plan.slot.slot, config.num_slots)
        pages = [page - lane * config.num_pages for page in plan.page_ids]
        self._need(1 <= kv_len <= config.max_context, f"{where}: {kv_len} tokens of {config.max_context}")
        needed = -(-kv_len // config.page_size)
        self._need(needed <= len(pages) <= self.max_pages, f"{where}: {len(pages)} pages for {kv_len} tokens")
        self._need(
            min(pages) > 0 and max(pages) < config.num_pages,
            f"{where}: lane {lane}: page ids {min(pages)}..{max(pages)}",
        )
        view["page_table_ZM"][index, :needed] = pages[:needed]
        view["kv_len_Z"][index] = kv_len
        view["slot_Z"][index] = slot if samples else config.num_slots
        view["holds_stops_Z"][index] = samples and plan.output_index < min_tokens[plan.slot.slot]

    @staticmethod
    def _need(ok: bool, what: str) -> None:
        if not ok:
            raise InvariantError(f"{what} is out of range")
