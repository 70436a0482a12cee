"""Block sizes of the TPU's decode and matmul kernels, ranked for one chip; the best go into
``pallas_kernels/tuned/<chip>.json``.

Without the chip, by static cost: the compiler's bundles times their trips, or the time of the bytes where that is
longer, and of a product the copy of the first tile, which nothing hides; what spills is out. On the chip (``--time``),
by measured time. Only what beats the heuristic by more than MARGIN is written. Needs libtpu: ``make aot-tpu`` has an
environment with it. Prefill is not here: its sizes are the largest that do not spill.
"""

import argparse
import dataclasses
import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from headrace.pallas_kernels import api
from headrace.pallas_kernels.chips import CHIPS, Chip
from headrace.pallas_kernels.grouped_matmul import cases as grouped_cases
from headrace.pallas_kernels.grouped_matmul import cost as grouped_cost
from headrace.pallas_kernels.grouped_matmul import tpu as grouped
from headrace.pallas_kernels.paged_attention import decode_blocks
from headrace.pallas_kernels.paged_attention.cases import AttentionCase
from headrace.pallas_kernels.paged_attention.inputs import make_inputs
from headrace.pallas_kernels.quant_matmul import cases as quant_cases
from headrace.pallas_kernels.quant_matmul import cost as quant_cost
from headrace.pallas_kernels.quant_matmul import tpu as quant
from headrace.pallas_kernels.roofline import Cost, stored_bytes
from headrace.pallas_kernels.types import GroupQuant, Implementation, Kernels, UnsupportedCase
from scripts import device_timing
from scripts.device_speed import attention_seconds
from tests.aot import decode_cost, matrix
from tests.aot import tpu as aot
from tests.aot.bundles import Loop, read_dump
from tests.aot.matrix import HEADS_PER_KV_HEAD, Built, Entry, Operation, array

TUNED = Path(__file__).resolve().parent.parent / "pallas_kernels" / "tuned"
COLUMNS = (128, 256, 512, 1024, 2048)
LOOP_ROWS = (256, 512, 1024, 2048)
BLOCK_TOKENS, GROUPS, HEAD_ROWS = (256, 512, 1024), (4, 8, 16), (16, 32)
"""Of decode: tokens of a key block, sequences of a grid step, query heads at a time."""
MARGIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call to tune. operation, key: in the tuned file; the kernel's instruction has the operation's name.

    built: the call for some kernels, to compile. static_s: its seconds with some blocks, from its kernel's loops.
    timed_s: its measured seconds.
    """

    operation: str
    name: str
    key: str
    heuristic: Any
    candidates: tuple[Any, ...]
    built: Callable[[Kernels], Built]
    static_s: Callable[[Loop, Any], float]
    timed_s: Callable[[Kernels], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product to tune. call: (kernels, arguments). trips: grid steps with some blocks, and iterations in each.
    tile_bytes: of the weight in one grid step. inputs: real arguments."""

    chip: Chip
    call: Callable[..., jax.Array]
    shapes: tuple[Any, ...]
    inputs: Callable[[], tuple[Any, ...]]
    cost: Cost
    trips: Callable[[Any], tuple[int, int]]
    tile_bytes: Callable[[Any], int]

    def built(self, kernels: Kernels) -> Built:
        function = functools.partial(self.call, kernels)
        return Built(function=function, arguments=self.shapes, donated=(), donated_bytes=0, bound_bytes=0)

    def static_s(self, kernel: Loop, blocks: Any) -> float:
        """Bundles times trips at the chip's clock, or the bytes at its bandwidth; and the first tile's copy. The grid
        is the outer loop, and loops in it run over the weight's rows; a kernel without loops is one step."""
        assert self.chip.clock_hz is not None
        steps, iterations = self.trips(blocks)
        trips = {0: 1, 1: steps, 2: steps * iterations}
        cycles = sum(loop.bundles * trips[min(loop.depth, 2)] for _, loop in kernel.walk())
        moved_s = self.cost.bytes / self.chip.hbm_bytes_per_s
        return max(cycles / self.chip.clock_hz, moved_s) + self.tile_bytes(blocks) / self.chip.hbm_bytes_per_s

    def timed_s(self, kernels: Kernels) -> float:
        """The result is added to x with factor 0, so that no call can be left out."""
        x, *rest = jax.tree.map(jnp.asarray, self.inputs())

        def step(x: jax.Array, rest: list[Any]) -> jax.Array:
            return x + (0 * self.call(kernels, x, *rest)[:, :1]).astype(x.dtype)

        return device_timing.seconds_per_call(step, x, rest)

    def task(self, **fields: Any) -> Task:
        return Task(built=self.built, static_s=self.static_s, timed_s=self.timed_s, **fields)


def decode_tasks(chip: Chip) -> Iterator[Task]:
    """Decode entries of the compile matrix without window, cap and sinks: 64 sequences of 1,024 tokens on average."""
    for entry in matrix.entries((chip.name,)):
        if entry.operation is not Operation.DECODE or entry.has_sinks:
            continue
        shape = decode_cost.shape_of(entry)
        first = decode_blocks.heuristic(shape, chip.name)
        yield Task(
            operation="paged_attention_decode",
            name=entry.name,
            key=shape.key,
            heuristic=first,
            candidates=tuple(
                decode_blocks.DecodeBlocks(block_pages=tokens // entry.page_tokens, group=group, rows=rows)
                for tokens in BLOCK_TOKENS
                if tokens >= entry.page_tokens
                for group in GROUPS
                for rows in HEAD_ROWS
            ),
            built=functools.partial(matrix.build, entry),
            static_s=functools.partial(_decode_static_s, entry),
            timed_s=functools.partial(_decode_timed_s, entry),
        )


def _decode_static_s(entry: Entry, kernel: Loop, blocks: decode_blocks.DecodeBlocks) -> float:
    cost = decode_cost.decode_cost(entry, kernel, blocks)
    return max(cost.bundles_us, cost.bytes_us) / 1e6


def _decode_timed_s(entry: Entry, kernels: Kernels) -> float:
    heads = {"num_heads": entry.kv_heads * HEADS_PER_KV_HEAD, "num_kv_heads": entry.kv_heads}
    case = AttentionCase(
        name=entry.name,
        **heads,
        head_dim=entry.head_dim,
        page_tokens=entry.page_tokens,
        decode_lens=decode_cost.LENS,
        q_dtype="bfloat16",
        kv_dtype=str(matrix.pool_dtype(entry)),
    )
    made = make_inputs(case, seed=1)
    return attention_seconds(jax.tree.map(jnp.asarray, made.arguments()[:3]), made, kernels)


def quant_tasks(chip: Chip) -> Iterator[Task]:
    """Group-quantized cases; one scale per column has no blocks."""
    for case in quant_cases.MODEL_CASES:
        if case.group is None:
            continue
        shape = case.rows, case.contraction, case.columns, case.bits, case.group, jnp.dtype(case.x_dtype)
        first = quant.heuristic(*shape, chip.name)
        factors = array((case.contraction // case.group, case.columns), case.scale_dtype)
        values = array((case.contraction, case.columns), f"int{case.bits}")
        weight = GroupQuant(values, factors, factors if case.affine else None)
        product = Product(
            chip=chip,
            call=lambda kernels, x, weight: api.quant_matmul(x, weight, kernels=kernels),
            shapes=(array((case.rows, case.contraction), case.x_dtype), weight),
            inputs=lambda case=case: _quant_inputs(case),
            cost=quant_cost.cost(case),
            trips=lambda blocks, case=case: (
                -(-case.rows // blocks.rows) * -(-case.columns // blocks.columns),
                case.contraction // blocks.loop_rows,
            ),
            tile_bytes=lambda blocks, case=case: stored_bytes(case.contraction * blocks.columns, f"int{case.bits}"),
        )
        yield product.task(
            operation="quant_matmul",
            name=case.name,
            key=quant.tuned_key(*shape),
            heuristic=first,
            candidates=tuple(
                dataclasses.replace(first, columns=columns, loop_rows=loop_rows)
                for columns in COLUMNS
                for loop_rows in LOOP_ROWS
                if columns <= case.columns
                and case.contraction % loop_rows == 0
                and quant.is_aligned(loop_rows, case.group)
            ),
        )


def _quant_inputs(case: quant_cases.QuantCase) -> tuple[Any, ...]:
    inputs = quant_cases.make_inputs(case, seed=1)
    return inputs.x_MK, inputs.weight


def grouped_tasks(chip: Chip) -> Iterator[Task]:
    """All cases, with rows spread as the first seed spreads them."""
    for case in grouped_cases.MODEL_CASES:
        dtype = jnp.dtype(case.x_dtype if case.bits is None else f"int{case.bits}")
        shape = case.rows, case.num_experts, case.contraction, case.columns, dtype, jnp.dtype(case.x_dtype)
        first = grouped.heuristic(*shape)
        sizes = grouped_cases.draw_sizes(case, np.random.default_rng(1))
        weight: Any = array((case.experts_here, case.contraction, case.columns), dtype)
        if case.bits is not None:
            scale = array((case.experts_here, 1, case.columns), case.x_dtype)
            weight = GroupQuant(weight, scale)

        def call(kernels: Kernels, x: Any, weight: Any, sizes: Any, offset: int = case.group_offset) -> jax.Array:
            return api.grouped_matmul(x, weight, sizes, group_offset=offset, kernels=kernels)

        def trips(blocks: Any, case: grouped_cases.GroupedCase = case, sizes: np.ndarray = sizes) -> tuple[int, int]:
            visits = count_visits(case, sizes, blocks.rows)
            return -(-case.columns // blocks.columns) * visits, case.contraction // blocks.loop_rows

        product = Product(
            chip=chip,
            call=call,
            shapes=(
                array((case.rows, case.contraction), case.x_dtype),
                weight,
                array((case.num_experts,), jnp.int32),
            ),
            inputs=lambda case=case: _grouped_inputs(case),
            cost=grouped_cost.cost(case, sizes),
            trips=trips,
            tile_bytes=lambda blocks, case=case, dtype=dtype: stored_bytes(case.contraction * blocks.columns, dtype),
        )
        yield product.task(
            operation="grouped_matmul",
            name=case.name,
            key=grouped.tuned_key(*shape),
            heuristic=first,
            candidates=tuple(
                grouped.GroupedBlocks(rows=rows, columns=columns, loop_rows=loop_rows)
                for rows in {first.rows, *((128, 256) if case.rows > grouped.SMALL_ROWS else ())}
                for columns in COLUMNS
                for loop_rows in LOOP_ROWS
                if columns <= case.columns and case.contraction % loop_rows == 0
            ),
        )


def count_visits(case: grouped_cases.GroupedCase, sizes: np.ndarray, tile_rows: int) -> int:
    """Pairs of a tile of rows and a group that has rows in it; rows of other shards and padding are two more groups."""
    rows = max(case.rows, tile_rows)
    group = np.full(rows, case.num_experts)
    group[: sizes.sum()] = np.repeat(np.arange(case.num_experts), sizes)
    group = np.clip(group, case.group_offset - 1, case.group_offset + case.experts_here)
    return len(set(zip(np.arange(rows) // tile_rows, group, strict=True)))


def _grouped_inputs(case: grouped_cases.GroupedCase) -> tuple[Any, ...]:
    inputs = grouped_cases.make_inputs(case, seed=1)
    return inputs.x_MK, inputs.weight, inputs.group_sizes_G


def tasks_of(chip: Chip) -> Iterator[Task]:
    yield from decode_tasks(chip)
    yield from quant_tasks(chip)
    yield from grouped_tasks(chip)


def kernels_with(blocks: Any, chip: Chip) -> Kernels:
    return Kernels(implementation=Implementation.TPU, chip=chip.name, blocks=(blocks,))


def rank_static(task: Task, blocks: Any, chip: Chip, dump: Path) -> float:
    """Seconds by static cost. Raises: what the compiler does not take, UnsupportedCase included."""
    for path in dump.iterdir():
        path.unlink()
    aot.compile_for(chip.name, task.built(kernels_with(blocks, chip)))
    (kernel,) = read_dump(dump, {f"{task.operation}.1"}).values()
    if kernel.spills():
        raise UnsupportedCase(f"{kernel.spills()} spills and fills")
    return task.static_s(kernel, blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", required=True, choices=[c.name for c in CHIPS.values() if c.topology])
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="cases whose name has this")
    parser.add_argument("--time", action="store_true", help="measure on the chip, which must be there")
    parser.add_argument("--write", action="store_true", help="write the tuned file; else only print")
    options = parser.parse_args()
    chip = CHIPS[options.chip]
    if not options.time and chip.clock_hz is None:
        print(f"tune_kernels: no clock of {chip.name} is known, so that bundles give no time; --time", file=sys.stderr)
        return 2
    tasks = [task for task in tasks_of(chip) if options.only.search(task.name)]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.time:
        if jax.devices()[0].device_kind not in chip.device_kinds:
            print(f"tune_kernels: --time needs a {chip.name}", file=sys.stderr)
            return 2
        best = search(tasks, lambda task, blocks: task.timed_s(kernels_with(blocks, chip)), console)
    else:
        with tempfile.TemporaryDirectory(prefix="headrace-tune-") as folder:
            dump = Path(folder)
            aot.prepare(dump)
            best = search(tasks, functools.partial(rank_static, chip=chip, dump=dump), console)
    if options.write:
        write(TUNED / f"{chip.name}.json", best)
    return 0


def search(tasks: list[Task], rank: Callable[[Task, Any], float], console: Console) -> dict[str, dict[str, Any]]:
    """{operation: {key: blocks}} of the tasks for which something beats the heuristic."""
    best: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("blocks", total=sum(1 + len(task.candidates) for task in tasks))
        for task in tasks:
            seconds: dict[Any, float] = {}
            for blocks in (task.heuristic, *task.candidates):
                progress.update(bar, description=task.name)
                if blocks not in seconds:
                    try:
                        seconds[blocks] = rank(task, blocks)
                    except UnsupportedCase as error:
                        progress.console.print(f"{task.name}: {blocks}: {error.why}")
                progress.advance(bar)
            if task.heuristic not in seconds:
                continue
            chosen = min(seconds, key=lambda blocks: seconds[blocks])
            usual_s = seconds[task.heuristic]
            progress.console.print(
                f"{task.name}: heuristic {usual_s * 1e6:.1f} us, best {seconds[chosen] * 1e6:.1f} us with {chosen}"
            )
            if seconds[chosen] < (1 - MARGIN) * usual_s:
                best.setdefault(task.operation, {})[task.key] = dataclasses.asdict(chosen)
    return best


def write(path: Path, best: dict[str, dict[str, Any]]) -> None:
    """Add to what the file holds."""
    known = json.loads(path.read_text()) if path.is_file() else {}
    for operation, entries in best.items():
        known.setdefault(operation, {}).update(entries)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
