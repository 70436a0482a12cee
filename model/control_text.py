"""Finding the text of control tokens in other text."""

import re
from collections.abc import Iterable


class ControlText:
    """The texts of the control tokens; one of a single character cannot be told from content and is left out."""

    def __init__(self, texts: Iterable[str]) -> None:
        # Longest first, as the tokenizer library prefers them.
        ordered = sorted((text for text in set(texts) if len(text) > 1), key=lambda text: (-len(text), text))
        nothing = r"(?!)"
        self._whole = re.compile("|".join(map(re.escape, ordered)) or nothing)
        self._captured = re.compile(f"({self._whole.pattern})")
        self._breaks = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in ordered) or nothing)
        self._longest = len(ordered[0]) if ordered else 0
        self._beginnings = frozenset(text[:cut] for text in ordered for cut in range(1, len(text)))
        self._ends = frozenset(text[cut:] for text in ordered for cut in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in ordered)
        self._lasts = frozenset(text[-1] for text in ordered)
        self._ordered = ordered

    def occurs_in(self, text: str) -> bool:
        return self._whole.search(text) is not None

    def count(self, text: str) -> int:
        return sum(1 for _ in self._whole.finditer(text))

    def split(self, text: str) -> list[str]:
        """Ordinary text and control text in turn, ordinary text (maybe "") first and last."""
        return self._captured.split(text)

    def split_ordinary(self, text: str) -> list[str]:
        """The text in pieces, none of which holds a control text whole: each is parted after its first character."""
        return self._breaks.split(text)

    def touches(self, text: str) -> bool:
        """Whether the text begins with the end, or ends with the beginning, of a control text."""
        most = self._longest - 1
        if most < 1 or (self._firsts.isdisjoint(text[-most:]) and self._lasts.isdisjoint(text[:most])):
            return False  # By far the most texts end here, without a slice per length.
        return any(
            text[-n:] in self._beginnings or text[:n] in self._ends for n in range(1, min(self._longest, len(text) + 1))
        )

    def may_straddle(self, text: str) -> bool:
        """Whether text around this one could complete a control text with it or with part of it."""
        inside = 0 < len(text) < self._longest and any(text in control for control in self._ordered)
        return inside or self.touches(text)
