"""One prompt, many ways through the engine: 12 prompts of the golden file, 24 greedy tokens each, on the default model.

Shows: alone = in a batch of 8 = in chunks of 16, 64 and 512 = with a cold and a warm prefix cache = preempted =
streamed over the WebSocket = over HTTP, whole and streamed = from safetensors in shards. Ids may part only where the
two best logits of the first way are closer than 0.02.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from headrace import LLM
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.serving.app.offline import Completion
from scripts import evidence
from tests.live import start_server
from tests.numerics import hf_directory, outputs
from tests.numerics.golden import FLIP_GAP, Reference, find_flips, references
from tests.numerics.outputs import Output, of_completion

PROMPTS = (0, 1, 6, 11, 13, 15, 21, 24, 28, 33, 48, 54)
"""Of the golden file: scripts, emoji, chats, near ties, and 5 to 513 tokens, so that each chunk size cuts some."""
NUM_TOKENS = 24
BATCH = 8
SMALL: dict[str, Any] = {"num_slots": BATCH, "context": 1024, "prefix_cache": False}
TIGHT: dict[str, Any] = {"page_size": 8, "pages": 76, "chunk_tokens": 64}
"""The longest prompt needs 68 of the 75 pages with its output."""
PAGES_LEFT = 3
"""What a prompt and an older one leave free in TIGHT memory; their outputs need three pages each."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """outputs: one per prompt. facts: what shows that the way was really taken."""

    name: str
    outputs: list[Output]
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the others are compared with. gaps: between the two best logits, per prompt and position."""

    outputs: list[Output]
    gaps: list[list[float]]


def generate(llm: LLM, prompts: Sequence[Sequence[int]], num_logprobs: int = 0) -> list[Completion]:
    """All at once."""
    return llm.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, num_logprobs=num_logprobs)


def alone(llm: LLM, prompts: Sequence[Reference], num_logprobs: int = 0) -> list[Completion]:
    return [completion for prompt in prompts for completion in generate(llm, [prompt.prompt_ids], num_logprobs)]


def way(name: str, completions: Sequence[Completion], **facts: object) -> Way:
    return Way(name=name, outputs=[of_completion(completion) for completion in completions], facts=facts)


def base_and_batch(llm: LLM, prompts: list[Reference]) -> tuple[Base, list[Way]]:
    completions = alone(llm, prompts, num_logprobs=2)
    gaps = [[entry.top[0][1] - entry.top[1][1] for entry in completion.logprobs or ()] for completion in completions]
    base = Base(outputs=[of_completion(completion) for completion in completions], gaps=gaps)
    steps = llm.stats().steps
    ids = [prompt.prompt_ids for prompt in prompts]
    first, second = generate(llm, ids[:BATCH]), generate(llm, ids[-BATCH:])
    batch = [*first, *second[2 * BATCH - len(prompts) :]]
    return base, [way("batch of 8", batch, share_of_the_steps_of_alone=(llm.stats().steps - steps) / steps)]


def cold_and_warm(llm: LLM, prompts: list[Reference]) -> list[Way]:
    found = []
    for name in ("prefix cache cold", "prefix cache warm"):
        completions = alone(llm, prompts)
        found.append(way(name, completions, cached_tokens=[c.usage.cached_tokens for c in completions]))
    return found


def in_chunks(llm: LLM, prompts: list[Reference]) -> list[Way]:
    return [way(f"chunks of {llm.options.chunk_tokens}", alone(llm, prompts))]


def from_safetensors(llm: LLM, prompts: list[Reference]) -> list[Way]:
    return [way("from safetensors", alone(llm, prompts))]


def preempted(llm: LLM, prompts: list[Reference]) -> list[Way]:
    """Each beside an older prompt, which takes its pages while both decode; and alone in the same engine."""
    by_itself = alone(llm, prompts)
    page_size, usable = TIGHT["page_size"], TIGHT["pages"] - 1
    beside = []
    for prompt in prompts:
        num_pages = usable - PAGES_LEFT - -(-len(prompt.prompt_ids) // page_size)
        older = references()[-1].prompt_ids[: num_pages * page_size]
        beside.append(generate(llm, [older, prompt.prompt_ids])[1])
    return [
        way("chunks of 64", by_itself, preemptions=[c.metrics.preemptions for c in by_itself]),
        way("preempted", beside, preemptions=[c.metrics.preemptions for c in beside]),
    ]


def served(prompts: list[Reference]) -> list[Way]:
    """One server with default options; every door gets all prompts at once."""
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder) / "log", DEFAULT_MODEL, ready_timeout_s=600)
        try:
            return [
                Way(
                    name="streamed over the WebSocket",
                    outputs=asyncio.run(outputs.websocket(server.stream_url, prompts, NUM_TOKENS)),
                ),
                Way(name="over HTTP", outputs=outputs.http_whole(server.url, prompts, NUM_TOKENS)),
                Way(name="streamed over HTTP", outputs=outputs.http_streamed(server.url, prompts, NUM_TOKENS)),
            ]
        finally:
            server.stop()


def with_engine(use: Callable[[LLM, list[Reference]], T], model: str, prompts: list[Reference], **options: Any) -> T:
    """One engine at a time: each holds its weights and pages."""
    try:
        return use(LLM(model, **options), prompts)
    finally:
        gc.collect()


def all_ways(model: str, prompts: list[Reference], progress: Progress) -> tuple[Base, list[Way]]:
    bar = progress.add_task("ways", total=7)
    base, ways = with_engine(base_and_batch, model, prompts, prefix_cache=False)
    progress.advance(bar)
    engines: list[tuple[Callable[[LLM, list[Reference]], list[Way]], dict[str, Any]]] = [
        (cold_and_warm, {}),
        (in_chunks, SMALL | {"chunk_tokens": 16}),
        (preempted, TIGHT | SMALL),
        (in_chunks, SMALL | {"chunk_tokens": 512}),
    ]
    for use, options in engines:
        ways += with_engine(use, model, prompts, **options)
        progress.advance(bar)
    with tempfile.TemporaryDirectory() as folder:
        shards = hf_directory.export(Path(model), Path(folder) / "model", num_shards=3)
        ways += with_engine(from_safetensors, str(shards), prompts, prefix_cache=False)
    progress.advance(bar)
    ways += served(prompts)
    progress.advance(bar)
    return base, ways


def compare(found: Way, base: Base) -> dict[str, object]:
    """Ids, logprobs and texts of one way against the base, up to the first flip of each prompt."""
    ids, expected = ([output.ids for output in of] for of in (found.outputs, base.outputs))
    flips = find_flips(ids, expected, base.gaps, num_tokens=NUM_TOKENS)
    ends = {flip.prompt: flip.position for flip in flips}
    pairs = list(zip(found.outputs, base.outputs, strict=True))
    off = [
        np.abs(np.subtract(mine.logprobs, theirs.logprobs)[: ends.get(index)])
        for index, (mine, theirs) in enumerate(pairs)
    ]
    faults = [
        f"prompt {i}: prompt ids" for i, (mine, theirs) in enumerate(pairs) if mine.prompt_ids != theirs.prompt_ids
    ]
    faults += [
        f"prompt {i}: text" for i, (mine, theirs) in enumerate(pairs) if i not in ends and mine.text != theirs.text
    ]
    return {
        "flips": [asdict(flip) for flip in flips],
        "first_divergence": min((asdict(flip) for flip in flips), key=lambda flip: flip["position"], default=None),
        "faults": faults,
        "prompts_with_bit_equal_logprobs": sum(not of.any() for of in off),
        "max_logprob_difference": float(f"{max(of.max(initial=0) for of in off):.2g}"),
        **found.facts,
        "passed": all(flip.is_near_tie for flip in flips) and not faults,
    }


def really_taken(ways: dict[str, dict[str, Any]]) -> bool:
    """Whether each way was the one that its name says."""
    return (
        ways["batch of 8"]["share_of_the_steps_of_alone"] < 0.5
        and sum(ways["prefix cache warm"]["cached_tokens"]) > sum(ways["prefix cache cold"]["cached_tokens"])
        and min(ways["preempted"]["preemptions"]) > 0 == max(ways["chunks of 64"]["preemptions"])
    )


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    start_s, golden = time.monotonic(), references()
    prompts = [golden[index] for index in PROMPTS]
    with Progress(console=Console(stderr=True)) as progress:
        base, ways = all_ways(str(resolve_model(DEFAULT_MODEL).path), prompts, progress)
    from_transformers = Way(
        name="transformers",
        outputs=[
            Output(prompt_ids=p.prompt_ids, ids=p.ids[:NUM_TOKENS], logprobs=p.logprobs[:NUM_TOKENS], text=mine.text)
            for p, mine in zip(prompts, base.outputs, strict=True)
        ],
    )
    found = {each.name: compare(each, base) for each in (*ways, from_transformers)}
    return evidence.write(
        args.out,
        all(bool(each["passed"]) for each in found.values()) and really_taken(found),
        base="alone, chunks of at most 256, no prefix cache",
        prompts=[len(prompt.prompt_ids) for prompt in prompts],
        new_tokens_each=NUM_TOKENS,
        near_ties=sum(gap < FLIP_GAP for gaps in base.gaps for gap in gaps),
        ways=found,
        seconds=round(time.monotonic() - start_s),
    )


if __name__ == "__main__":
    raise SystemExit(main())
