"""What one tenant's prompts show of another's, on the real server: no cached token, and no time that differs.

Pairs of requests with equally long prompts on the tiny model, in random order: of tenant B, one prompt that tenant A
has just sent and one that nobody has; and as a control, of tenant B, one that B itself has sent before and one that
nobody has. Mann-Whitney's test on the times to the first token must see the control (p < 1e-6) and not the other.
"""

import asyncio
import random
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import track
from scipy.stats import mannwhitneyu

from headrace.serving.bench.native_target import NativeTarget
from headrace.serving.bench.targets import Server
from headrace.serving.edge.keys import digest_line, new_key
from scripts import evidence
from tests.live import start_server

PROMPT_TOKENS = 320
"""Long enough that reading it takes the tiny model several times as long as a step."""
CONTROL_P = 1e-6
NO_DIFFERENCE_P = 0.001
"""Chance of a false alarm when there is nothing to see."""
OPTIONS = ("--max-streams", "4", "--context", "512", "--chunk-tokens", "64", "--kv-memory", "64MiB")


class Prober:
    """Two tenants of one server."""

    def __init__(self, mine: NativeTarget, other: NativeTarget, seed: int) -> None:
        self._mine, self._other = mine, other
        self._rng = random.Random(seed)
        self._index = 0

    async def pair(self, first_by_self: bool) -> tuple[float, float, int]:
        """(ms of the prompt that was sent before, ms of one that was not, cached tokens of the former)."""
        known, fresh = self._prompt(), self._prompt()
        await self._ask(self._mine if first_by_self else self._other, known)
        if self._rng.random() < 0.5:
            known_ms, cached = await self._ask(self._mine, known)
            fresh_ms, _ = await self._ask(self._mine, fresh)
        else:
            fresh_ms, _ = await self._ask(self._mine, fresh)
            known_ms, cached = await self._ask(self._mine, known)
        return known_ms, fresh_ms, cached

    async def _ask(self, target: NativeTarget, prompt: list[int]) -> tuple[float, int]:
        self._index += 1
        body: dict[str, object] = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        outcome = await target.ask(self._index, body)
        if outcome.error is not None or outcome.first_s is None:
            raise RuntimeError(f"a request failed: {outcome.error}")
        return 1e3 * (outcome.first_s - outcome.sent_s), outcome.cached_tokens

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(16, 250) for _ in range(PROMPT_TOKENS)]


async def measure(url: str, keys: dict[str, str], num_pairs: int) -> dict[str, object]:
    async with (
        NativeTarget(Server(base=url, key=keys["one"]), None) as mine,
        NativeTarget(Server(base=url, key=keys["other"]), None) as other,
    ):
        prober = Prober(mine, other, seed=1)
        for _ in range(20):
            await prober.pair(True)
        across, control = [], []
        for _ in track(range(num_pairs), "pairs", console=Console(stderr=True)):
            across.append(await prober.pair(False))
            control.append(await prober.pair(True))
    return {"across tenants": figures(across), "inside one tenant": figures(control)}


def figures(pairs: list[tuple[float, float, int]]) -> dict[str, object]:
    known, fresh = [p[0] for p in pairs], [p[1] for p in pairs]
    return {
        "pairs": len(pairs),
        "p": float(mannwhitneyu(known, fresh, alternative="two-sided").pvalue),
        "median_ms_sent_before": round(statistics.median(known), 4),
        "median_ms_fresh": round(statistics.median(fresh), 4),
        "cached_tokens_reported": sum(p[2] for p in pairs),
        "pairs_with_cached_tokens": sum(p[2] > 0 for p in pairs),
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=2_000)
    parser.add_argument("--model", default="tiny")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = {name: new_key() for name in ("one", "other")}
        key_file = Path(folder) / "keys"
        key_file.write_text("".join(digest_line(name, key) + "\n" for name, key in keys.items()))
        key_file.chmod(0o600)
        server = start_server(Path(folder) / "log", options.model, *OPTIONS, "--api-keys", str(key_file))
        try:
            found = asyncio.run(measure(server.url, keys, options.pairs))
        finally:
            server.stop()
    across, control = found["across tenants"], found["inside one tenant"]
    assert isinstance(across, dict) and isinstance(control, dict)
    passed = (
        across["p"] > NO_DIFFERENCE_P
        and across["cached_tokens_reported"] == 0
        and control["p"] < CONTROL_P
        and control["pairs_with_cached_tokens"] == control["pairs"]
    )
    return evidence.write(options.out, passed, prompt_tokens=PROMPT_TOKENS, options=OPTIONS, **found)


if __name__ == "__main__":
    raise SystemExit(main())
