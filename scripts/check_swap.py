"""Few pages and many requests: what preemption does to answers, and whether it says why.

Shows: in deterministic mode, which only swaps, the ids and every bit of the logprobs of requests that were preempted =
those of the same requests by themselves; swapped in normal mode, and computed again, their greedy ids (they may part
where the two best logits are closer than 0.02); and reasons and actions in ``done.metrics`` that add up to those of
``/metrics``.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from scripts import evidence, exact_answers
from scripts.check_deterministic import SERVER, differing, server_of
from scripts.exact_answers import Answer, preemption_counts, together
from tests.live import LiveServer
from tests.numerics.golden import find_flips

PAGES = ("--pages", "91")
SWAP = ("--swap-memory", "256MB")
MODES: dict[str, tuple[tuple[str, ...], str]] = {
    "deterministic": (("--deterministic", *SWAP), "swapped"),
    "swap": (("--preemption", "swap", *SWAP), "swapped"),
    "recompute": (("--preemption", "recompute"), "recomputed"),
}
"""Options, and the action that they lead to."""
ROUNDS = 2


def greedy(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts as in check-deterministic, with answers that outgrow the pages that were free when they started."""
    keep = ("prompt", "return_token_ids", "ignore_eos")
    bodies = exact_answers.asks(model, count, seed)
    return [{k: body[k] for k in keep} | {"temperature": 0, "logprobs": 2, "max_tokens": 32} for body in bodies]


def said(found: Sequence[Answer]) -> Counter[tuple[str, str]]:
    """What ``done.metrics`` says, by reason and action."""
    counts: Counter[tuple[str, str]] = Counter()
    for answer in found:
        for entry in answer.metrics["preempted"]:
            counts[entry["reason"], entry["action"]] += entry["count"]
    return counts


def counted(server: LiveServer) -> Counter[tuple[str, str]]:
    """What ``/metrics`` says."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, value in preemption_counts(server).items():
        words = dict(word.split("=") for word in name.split()[1:])
        if name.startswith("headrace_preemptions_total "):
            counts[words["reason"], words["action"]] += int(value)
    return counts


async def of_mode(server: LiveServer, name: str, bodies: list[dict[str, Any]], progress: Progress) -> dict[str, Any]:
    bar = progress.add_task(name, total=(1 + ROUNDS) * len(bodies))
    expected = await exact_answers.alone(server, bodies, lambda: progress.advance(bar))
    rounds = [(await together(server, bodies, lambda: progress.advance(bar)))[0] for _ in range(ROUNDS)]
    found = [answer for of in rounds for answer in of]
    flips = [
        flip
        for of in rounds
        for flip in find_flips(
            [answer.ids for answer in of],
            [answer.ids for answer in expected],
            [answer.gaps for answer in expected],
            num_tokens=len(expected[0].ids),
        )
    ]
    preempted = [index for of in rounds for index, answer in enumerate(of) if answer.preemptions]
    told, metrics = said([*expected, *found]), counted(server)
    action = MODES[name][1]
    ok = {
        "alone_is_never_preempted": not any(answer.preemptions for answer in expected),
        "preempted_by_the_action_of_the_mode": bool(told) and all(of == action for _, of in told),
        "done_metrics_add_up_to_metrics": told == metrics,
        "ids_part_at_near_ties_only": all(flip.is_near_tie for flip in flips),
        "bits_are_equal": all(not any(differing(of, expected).values()) for of in rounds),
    }
    return {
        "requests": len(found),
        "preempted_requests": len(preempted),
        "preemptions": {f"{reason}, {of}": count for (reason, of), count in told.items()},
        "flips": [asdict(flip) for flip in flips],
        **ok,
        "passed": all(fine for what, fine in ok.items() if what != "bits_are_equal" or name == "deterministic"),
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    bodies = greedy(args.model, args.requests, args.seed)
    modes: dict[str, dict[str, Any]] = {}
    with Progress(console=Console(stderr=True)) as progress:
        for name, (options, _) in MODES.items():
            with server_of(args.model, *SERVER, *PAGES, *options) as server:
                modes[name] = asyncio.run(of_mode(server, name, bodies, progress))
    passed = all(mode["passed"] for mode in modes.values())
    options = {name: [*SERVER, *PAGES, *of] for name, (of, _) in MODES.items()}
    return evidence.write(args.out, passed, model=args.model, seed=args.seed, options=options, modes=modes)


if __name__ == "__main__":
    raise SystemExit(main())
