"""Greedy ids and logprobs of the default model against Hugging Face transformers, every prompt of the golden file.

Shows: greedy ids through the engine, in continuous batches with chunked prefill; the logprob of every position under
the reference's own prefix, once decoded and twice as rows of prefill chunks, and for some prompts as one-token requests
over a warm prefix cache; and the token ids of ``headrace generate --chat``.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.progress import track

from headrace import LLM
from headrace.model.load import load_model
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from scripts import evidence
from tests.numerics.forced import ForcedDecoder
from tests.numerics.golden import (
    FLIP_GAP,
    LOGPROB_TOLERANCE,
    MAX_FLIP_SHARE,
    TOLERANCE_OF,
    Reference,
    find_flips,
    references,
)

CHUNKS = (64, 256)
QUESTION = "What is the capital of France?"
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
Json = dict[str, object]


def greedy(llm: LLM, prompts: list[Reference], num_tokens: int) -> tuple[list[Json], dict[str, float]]:
    """Flips, and how far the logprobs are off up to them."""
    ids = [prompt.prompt_ids for prompt in prompts]
    completions = llm.generate(ids, max_tokens=num_tokens, ignore_eos=True, temperature=0.0, num_logprobs=0)
    flips = find_flips(
        [completion.token_ids for completion in completions],
        [prompt.ids for prompt in prompts],
        [prompt.gaps for prompt in prompts],
        num_tokens=num_tokens,
    )
    ends = {flip.prompt: flip.position for flip in flips}
    logprobs = [
        [entry.chosen for entry in (completion.logprobs or ())[: ends.get(index)]]
        for index, completion in enumerate(completions)
    ]
    return [asdict(flip) for flip in flips], differences(logprobs, prompts)


def engine(path: str, prompts: list[Reference], score_every: int) -> Json:
    """Through the whole engine, with the options of ``headrace serve``."""
    llm = LLM(path)
    flips, decoded = greedy(llm, prompts, len(prompts[0].ids))
    steps, some = llm.stats().steps, prompts[::score_every]
    scores = [
        [entry.chosen for entry in llm.score(prompt.prompt_ids, prompt.ids)]
        for prompt in track(some, "one-token requests", console=Console(stderr=True))
    ]
    return {
        "attention": llm.attention,
        "activations": llm.activations,
        "scheduler": asdict(llm.resolved.scheduler),
        "steps_of_greedy": steps,
        "compiles_after_ready": llm.stats().compiles_after_ready,
        "flips": flips,
        "logprobs": {"greedy, up to a flip": decoded, "one-token requests": differences(scores, some)},
    }


def chunks(path: str, prompts: list[Reference]) -> dict[str, dict[str, float]]:
    """Every position as a row of a chunk, through the paged decoder of the reference."""
    model, longest = load_model(path), max(len(prompt.prompt_ids) + len(prompt.ids) for prompt in prompts)
    found = {}
    for size in CHUNKS:
        decoder = ForcedDecoder(model, max_tokens=longest, chunk_tokens=size)
        bar = track(prompts, f"chunks of {size}", console=Console(stderr=True))
        logprobs = [decoder.logprobs(prompt.prompt_ids, prompt.ids) for prompt in bar]
        found[f"chunks of {size}"] = differences(logprobs, prompts)
    return found


def differences(found: Iterable[Sequence[float]], prompts: Iterable[Reference]) -> dict[str, float]:
    """Between logprobs and the reference's, which are rounded to 1e-5."""
    pairs = zip(found, prompts, strict=True)
    off = np.concatenate([np.abs(np.subtract(mine, prompt.logprobs[: len(mine)])) for mine, prompt in pairs])
    percentiles = {f"p{q:g}": float(f"{np.percentile(off, q):.2g}") for q in (50, 90, 99, 99.9)}
    return {"positions": off.size, "max": float(f"{off.max():.2g}"), **percentiles}


def command_line() -> Json:
    """The very command, in a process of its own: one JSON object on standard output."""
    arguments = ["generate", "--chat", QUESTION, "--temperature", "0", "--json"]
    done = subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout) if done.returncode == 0 else {}
    return {
        "arguments": arguments,
        "exit_code": done.returncode,
        "lines_of_output": done.stdout.count("\n"),
        "token_ids": answer.get("token_ids"),
        "text": answer.get("text"),
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--score-every", type=int, default=8, help="one-token requests for every n-th prompt")
    args = parser.parse_args()
    path, prompts, start_s = str(resolve_model(DEFAULT_MODEL).path), references(), time.monotonic()
    seen = engine(path, prompts, args.score_every)
    gc.collect()
    by_reference = chunks(path, prompts)
    cli = command_line()
    flips: list[Json] = seen["flips"]
    bound = TOLERANCE_OF[str(seen["activations"])]
    are_near = all(of["max"] <= bound for of in seen["logprobs"].values())
    are_near &= all(of["max"] <= LOGPROB_TOLERANCE for of in by_reference.values())
    seen["logprobs"] |= by_reference
    passed = (
        all(flip["gap"] < FLIP_GAP for flip in flips)
        and len(flips) <= MAX_FLIP_SHARE * len(prompts)
        and are_near
        and seen["compiles_after_ready"] == 0
        and (cli["token_ids"], cli["lines_of_output"]) == (ANSWER, 1)
    )
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    workload = {
        "prompts": len(prompts),
        "chats": sum(prompt.messages is not None for prompt in prompts),
        "prompt_tokens": {"min": min(lengths), "max": max(lengths), "sum": sum(lengths)},
        "new_tokens_each": len(prompts[0].ids),
        "near_ties": sum(gap < FLIP_GAP for prompt in prompts for gap in prompt.gaps),
    }
    seconds = round(time.monotonic() - start_s)
    return evidence.write(args.out, passed, workload=workload, **seen, command_line=cli, seconds=seconds)


if __name__ == "__main__":
    raise SystemExit(main())
