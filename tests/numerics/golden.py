"""What Hugging Face transformers makes of SmolLM2-135M-Instruct in float32 (see scripts/make_golden.py)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

FILE = Path(__file__).resolve().parents[1] / "golden" / "smollm2_135m_greedy.json"
FLIP_GAP = 0.02
"""Two logits this close may change places with the order of a float32 sum."""
LOGPROB_TOLERANCE = 2e-4
"""Float32 on a CPU stays within 4e-5 of the reference; a norm with an epsilon of 1e-6 for 1e-5 is 7e-4 off."""
INT16_LOGPROB_TOLERANCE = 4e-3
"""With int16 activations: the largest of 2,736 differences measured is 1.95e-3 (scripts/check_activations.py)."""
TOLERANCE_OF = MappingProxyType({"exact": LOGPROB_TOLERANCE, "int16": INT16_LOGPROB_TOLERANCE})
"""By how products read their inputs; int8 activations keep no tolerance."""
MAX_FLIP_SHARE = 0.02
"""Of all prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Greedy continuation of one prompt. messages: of a chat, which render to prompt_ids; else None.

    logprobs: of each id. gaps: between the two best logits at each position.
    """

    prompt_ids: tuple[int, ...]
    messages: Sequence[Mapping[str, str]] | None
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """The first position where the ids of a prompt differ from the reference's."""

    prompt: int
    position: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap < FLIP_GAP


def references() -> list[Reference]:
    """All prompts of the file."""
    rows = json.loads(FILE.read_text())["prompts"]
    return [
        Reference(
            prompt_ids=tuple(row["prompt_ids"]),
            messages=row.get("messages"),
            ids=tuple(row["ids"]),
            logprobs=tuple(row["logprobs"]),
            gaps=tuple(row["gaps"]),
        )
        for row in rows
    ]


def find_flips(
    outputs: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    gaps: Sequence[Sequence[float]],
    *,
    num_tokens: int,
) -> list[Flip]:
    """One per prompt that differs; behind a flip the prefixes differ, so nothing more can be compared.

    outputs: num_tokens ids each. expected, gaps: at least as many.
    """
    found = []
    for index, (ids, wanted, of) in enumerate(zip(outputs, expected, gaps, strict=True)):
        assert len(ids) == num_tokens <= len(wanted), f"prompt {index}: {len(ids)} ids, {len(wanted)} expected"
        position = next((i for i, token in enumerate(ids) if token != wanted[i]), None)
        if position is not None:
            found.append(Flip(prompt=index, position=position, gap=of[position]))
    return found
