"""How long each program of the CPU's kernels takes, what of it is custom calls, and how near one stream is to memory.

Steps run alone, without engine and host work, over pages that are dealt out at random. Each figure is a median of
single synchronised steps; the streaming read of the weights alternates with steps of one row. The profile is XLA's own
of a few more steps: a custom call counts from its start to its end on the thread that runs the program.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.pallas_kernels.native.probes import stream
from headrace.pallas_kernels.types import TiledQuant
from headrace.serving.app.build import program_shapes
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import Bucket, DecodeRow, PrefillSegment, ProgramKind, SlotRef, StepPlan
from headrace.serving.runner.arrays import make_pool, make_state, pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend, Wishes, choose_backend
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.load import PlacedModel, load_placed
from headrace.serving.runner.programs import program_name, step_program
from headrace.serving.runner.weights import weight_shapes
from scripts import evidence

ROWS = (1, 4, 8, 16, 32)
PROMPTS = ((1, 128), (1, 256), (2, 128))
"""(decode rows, prompt tokens) of mixed steps, beside those without decode rows."""
CONTEXT = 200
PAGE = 16
PROFILED = 5
Json = dict[str, Any]


class Bench:
    """One model and one pool; programs are compiled as they are asked for."""

    def __init__(self, model: PlacedModel, backend: Backend, num_slots: int, *, has_objective: bool) -> None:
        self.model, self.backend = model, backend
        pages = 1 + num_slots * 32 + 64
        shapes = program_shapes(
            page_size=PAGE, num_slots=num_slots, chunk_tokens=256, has_objective=has_objective, is_deterministic=False
        )
        self.config = SchedulerConfig(
            num_slots=num_slots, page_size=PAGE, num_pages=pages, max_context=2048, chunk_tokens=256, **shapes
        )
        self.state, self.pool = (
            make_state(model.config, self.config, backend),
            make_pool(model.config, self.config, backend),
        )
        self.free = np.random.default_rng(0).permutation(np.arange(1, pages)).tolist()

    def pages(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // PAGE)))

    def prepare(self, bucket: Bucket, rows: int, prompt: int, context: int) -> tuple[Any, np.ndarray]:
        """(compiled program, packed inputs) of a step."""
        layout = InputLayout(bucket, self.config, self.model.config.vocab_size)
        kept, self.free = self.free, list(self.free)
        decode = tuple(
            DecodeRow(
                slot=SlotRef(i, 0),
                position=context,
                input_token=100 + i,
                page_ids=self.pages(context + 1),
                output_index=1,
            )
            for i in range(rows)
        )
        ids = tuple(int(x) for x in np.random.default_rng(1).integers(100, 40_000, prompt))
        segment = PrefillSegment(
            slot=SlotRef(rows, 0),
            start=0,
            token_ids=ids,
            page_ids=self.pages(prompt),
            samples=True,
            output_index=0,
        )
        plan = StepPlan(step_id=0, bucket=bucket, loads=(), decode=decode, prefill=(segment,) if prompt else ())
        self.free = kept
        packed = layout.pack(plan, dict.fromkeys(range(self.config.num_slots), 0))
        cfg, config = self.model.config, self.config
        program = step_program(
            cfg,
            layout,
            self.backend,
            weight_shapes(cfg, self.backend),
            pool_shapes(cfg, config, self.backend),
            state_shapes(cfg, config, self.backend),
        )
        return program.compile(self.backend.device), packed.array

    def step(self, program: Any, packed: np.ndarray) -> float:
        started = time.perf_counter()
        self.pool, self.state, _, result = program(self.model.weights, self.pool, self.state, None, packed)
        result.block_until_ready()
        return time.perf_counter() - started


def measure(bench: Bench, bucket: Bucket, rows: int, prompt: int, context: int, repeats: int) -> Json:
    program, packed = bench.prepare(bucket, rows, prompt, context)
    for _ in range(3):
        bench.step(program, packed)
    seconds = [bench.step(program, packed) for _ in range(repeats)]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                bench.step(program, packed)
        ops = profile(Path(folder))
    total = sum(ops.values())
    calls = ops.pop("ffi_call", 0.0)
    others = sorted(ops.items(), key=lambda of: -of[1])
    median = statistics.median(seconds) * 1e3
    return {
        "program": program_name(bucket),
        "rows": rows,
        "prompt_tokens": prompt,
        "context": context,
        "ms": round(median, 3),
        "best_ms": round(min(seconds) * 1e3, 3),
        "tokens_per_s": round((rows + prompt) / median * 1e3, 1),
        "custom_calls_share": round(calls / total, 4) if total else None,
        "other_ms": {name: round(ms, 4) for name, ms in others[:8]},
    }


def profile(folder: Path) -> dict[str, float]:
    """Milliseconds of each operation of one step, by its name without numbers; nested ones count once."""
    found: dict[str, float] = {}
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" not in stats:
                        continue
                    name = str(stats["hlo_op"]).rstrip("0123456789.").removesuffix(".clone")
                    found[name] = found.get(name, 0) + event.duration_ns / 1e6 / PROFILED
    # Calls and conditionals hold what they run, which is counted by itself.
    return {name: ms for name, ms in found.items() if name not in ("call", "cond", "while")}


def stream_share(bench: Bench, bucket: Bucket, context: int, pairs: int) -> Json:
    """Of one row: the time that reading all weights once takes, over that of a step; alternating."""
    program, packed = bench.prepare(bucket, 1, 0, context)
    blocks = [leaf for leaf in jax.tree.leaves(bench.model.weights) if leaf.dtype == np.uint8]
    read = jax.jit(lambda *of: stream(*of)).lower(*blocks).compile()
    ratios, reads, steps = [], [], []
    for _ in range(pairs):
        started = time.perf_counter()
        jax.block_until_ready(read(*blocks))
        reads.append(time.perf_counter() - started)
        steps.append(bench.step(program, packed))
        ratios.append(reads[-1] / steps[-1])
    size = sum(block.nbytes for block in blocks)
    return {
        "weight_bytes": size,
        "read_ms": round(statistics.median(reads) * 1e3, 3),
        "read_gb_per_s": round(size / statistics.median(reads) / 1e9, 2),
        "step_ms": round(statistics.median(steps) * 1e3, 3),
        "share": round(statistics.median(ratios), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--activations", default="int16", choices=("exact", "int16", "int8"))
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--fine", action="store_true", help="the programs of a server with --inter-token-ms")
    parser.add_argument("--repeats", type=int, default=25)
    args = parser.parse_args()
    path = str(resolve_model(args.model).path)
    wishes = Wishes(attention="cpu", activations=args.activations, kv_dtype=args.kv_dtype)
    backend = with_forms(choose_backend(jax.local_devices()[0], wishes), path)
    model = load_placed(path, backend)
    tiled = [
        x
        for x in jax.tree.leaves(model.weights, is_leaf=lambda x: isinstance(x, TiledQuant))
        if isinstance(x, TiledQuant)
    ]
    bench = Bench(model, backend, args.slots, has_objective=args.fine)
    decode = bench.config.decode_rows
    steps = []
    for rows in ROWS:
        of = next((n for n in decode if n >= rows), None)
        if of is not None:
            steps.append(measure(bench, Bucket(ProgramKind.DECODE, of), rows, 0, args.context, args.repeats))
    for rows, prompt in ((0, 128), (0, 256), *PROMPTS, (args.slots - 1, 256)):
        of = next(n for n in bench.config.prefill_tokens if n >= prompt)
        bucket = Bucket(ProgramKind.MIXED, args.slots, of)
        steps.append(measure(bench, bucket, rows, prompt, args.context, args.repeats))
    streamed = stream_share(bench, Bucket(ProgramKind.DECODE, decode[0]), args.context, 2 * args.repeats)
    return evidence.write(
        args.out,
        True,
        kernels={"isa": backend.isa, "activations": args.activations, "kv_dtype": backend.kv_dtype.name},
        tiled_weights=len(tiled),
        one_row=streamed,
        steps=steps,
    )


if __name__ == "__main__":
    raise SystemExit(main())
