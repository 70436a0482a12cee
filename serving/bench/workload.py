"""What a bench asks of a server: the same prompts for the same fields, whoever is asked."""

import hashlib
import json
import random
from dataclasses import asdict, dataclass

from headrace.serving.bench.targets import AS_SOON_AS_ASKED, Terms
from headrace.serving.core.errors import ConfigError

WORDS = (
    "river", "mill", "wheel", "stone", "water", "grain", "flour", "gate", "sluice", "head", "race", "turns", "slowly",
    "under", "the", "old", "bridge",
)  # fmt: skip
PROMPTS = "words-ids/1"
"""How prompts are drawn; another number where the same fields would give others."""
FIRST_ID, LAST_ID = 1_000, 30_000
"""Ids that nearly every vocabulary has, and that are rarely control tokens."""
MAX_TOKENS_IN_ALL = 20_000_000
"""Times of so many tokens are kept: a few hundred MB."""
_LIMITS = {
    "streams": 4_096, "requests": 1_000_000, "prompt_words": 100_000, "prompt_tokens": 1_000_000, "max_tokens": 100_000,
    "warmup": 10_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A closed loop: as many streams as told, each of which asks again when it has its answer.

    requests: in all, besides warmup ones, which are not counted. prompt_words: of plain words; or prompt_tokens: of
    ids, exactly so many (one of the two, the other 0). max_tokens: of an answer, which goes on past its end where
    ignore_eos is set. seed: of the prompts, all different, and of drawn answers.

    Raises: ConfigError naming the option and its limit.
    """

    streams: int
    requests: int
    max_tokens: int
    prompt_words: int = 0
    prompt_tokens: int = 0
    warmup: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            least = 1 if name in ("streams", "requests", "max_tokens") else 0
            if not least <= getattr(self, name) <= limit:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {getattr(self, name)}; it must be from {least} to {limit:,}")
        if bool(self.prompt_words) == bool(self.prompt_tokens):
            raise ConfigError("give either --prompt-words or --prompt-tokens, at least 1")
        if not 0 <= self.temperature <= 2:
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be from 0 to 2")
        if self.requests * self.max_tokens > MAX_TOKENS_IN_ALL:
            raise ConfigError(
                f"--requests {self.requests} of --max-tokens {self.max_tokens} are {self.requests * self.max_tokens:,} "
                f"tokens; {MAX_TOKENS_IN_ALL:,} are the most whose times are kept"
            )

    def prompt(self, index: int) -> str | list[int]:
        """Of one request; those of warm-up have indexes below 0."""
        rng = random.Random(f"{PROMPTS}:{self.seed}:{index}")
        if self.prompt_tokens:
            return [rng.randrange(FIRST_ID, LAST_ID) for _ in range(self.prompt_tokens)]
        return " ".join(rng.choices(WORDS, k=self.prompt_words))

    def body(self, index: int) -> dict[str, object]:
        """What both APIs call a completion. Greedy answers need no seed, and some servers refuse one."""
        body: dict[str, object] = {
            "prompt": self.prompt(index),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature > 0:
            body["seed"] = (self.seed + index) % (1 << 31)
        return body

    def terms(self, index: int) -> Terms:
        """None of its requests has any."""
        return AS_SOON_AS_ASKED

    def counts(self, index: int) -> bool:
        """Whether its latencies do."""
        return True

    @property
    def hash(self) -> str:
        """SHA-256 over all that fixes the requests; two results with the same one had the same work."""
        fields = {"prompts": PROMPTS, "arrivals": "closed", **asdict(self)}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
