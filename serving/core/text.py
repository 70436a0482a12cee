"""From token ids to text, one token at a time: incremental UTF-8 and stop strings.

The work per token does not grow with the answer (table lookup, incremental decoder, one automaton step per
character), and what is kept is at most an unfinished character and the longest stop string.

What a client sees of broken characters: a character is sent when its last byte has arrived. Whether it is unfinished
is asked of the bytes, never of the text, so a real U+FFFD passes at once. Bytes that can be no UTF-8 become U+FFFD as
soon as that is certain; a character that the end of the output cuts becomes one U+FFFD, sent by ``flush``. Nothing of
the prompt is fed in, so bytes that would complete the prompt's last character are stray bytes. The joined deltas are
therefore always ``b"".join(bytes of all ids).decode("utf-8", "replace")``, streamed or not.
"""

import codecs
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one generation.

    token_bytes: the bytes of each id; an id beyond its end (a padded vocabulary) has none.
    skip_ids: ids without text, the control ids as a rule.
    strip_leading_space: drop one space at the very start, as SentencePiece vocabularies do for a text that stands
    alone. Not for the continuation of a prompt.
    """

    __slots__ = ("_decoder", "_skip_ids", "_strip", "_token_bytes")

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skip_ids: Container[int] = frozenset(),
        *,
        strip_leading_space: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._skip_ids = skip_ids
        self._strip = strip_leading_space
        self._decoder = _UTF8("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; ids must be >= 0."""
        table, skip = self._token_bytes, self._skip_ids
        return self._decoded(b"".join(table[i] for i in ids if i not in skip and i < len(table)), final=False)

    def flush(self) -> str:
        """The end of the output: U+FFFD for a character that was cut, else nothing."""
        return self._decoded(b"", final=True)

    def _decoded(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, one piece per token.

    The first is the one that *ends* first; of several that end at the same character, the longest. So of "a" and
    "ab" the first always wins, and of "b" and "ab" the second. That does not depend on how the text is cut.
    Text that may be the beginning of a stop string is held back until that is decided.

    stops: non-empty strings. include_stop: whether the stop string itself is part of the output.
    min_tokens: a stop string whose last character comes with one of the first ``min_tokens - 1`` tokens does not
    count, so the output has at least min_tokens tokens; its beginning may lie before.
    Source: Aho and Corasick, Efficient string matching, CACM 18(6), 1975.
    """

    __slots__ = ("_fail", "_found", "_held", "_hold", "_include", "_match", "_next", "_state", "_tokens_left")

    def __init__(self, stops: Iterable[str], include_stop: bool = False, *, min_tokens: int = 0) -> None:
        self._include = include_stop
        self._tokens_left = min_tokens
        self._found: str | None = None
        self._held = ""
        self._state = 0
        # Node 0 is the root. Per node: its edges, its longest proper suffix that is a node, the longest stop string
        # that ends here, and how many last characters can still become a stop string.
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self._hold = [0]
        depths = [0]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string is empty; it must have at least one character")
            node = 0
            for char in stop:
                child = self._next[node].setdefault(char, len(self._next))
                if child == len(self._next):
                    self._next.append({})
                    self._fail.append(0)
                    self._match.append(None)
                    self._hold.append(0)
                    depths.append(depths[node] + 1)
                node = child
            self._match[node] = stop
        self._link(depths)

    def _link(self, depths: list[int]) -> None:
        """Fill the suffix links, parents before children."""
        queue = [0]
        for node in queue:
            for char, child in self._next[node].items():
                queue.append(child)
                if node:
                    self._fail[child] = self._step(self._fail[node], char)
                suffix = self._fail[child]
                if self._match[child] is None:
                    self._match[child] = self._match[suffix]
                self._hold[child] = depths[child] if self._next[child] else self._hold[suffix]

    def _step(self, node: int, char: str) -> int:
        while True:
            target = self._next[node].get(char)
            if target is not None:
                return target
            if node == 0:
                return 0
            node = self._fail[node]

    @property
    def found(self) -> str | None:
        """The stop string that ended the output."""
        return self._found

    def push(self, text: str, *, num_tokens: int = 1) -> tuple[str, str | None]:
        """Take the text of one token (of ``num_tokens`` that count for the minimum).

        Returns: text to send, and the stop string that this piece completed. After that the output has ended and
        further pieces give ("", None).
        """
        if self._found is not None:
            return "", None
        self._tokens_left -= num_tokens
        if len(self._next) == 1:
            return text, None
        state, armed = self._state, self._tokens_left <= 0
        edges, fail, match = self._next, self._fail, self._match
        for position, char in enumerate(text):
            while char not in edges[state] and state:
                state = fail[state]
            state = edges[state].get(char, 0)
            stop = match[state]
            if stop is not None and armed:
                self._found = stop
                return self._ended(self._held + text[: position + 1], stop), stop
        self._state = state
        pending = self._held + text
        cut = len(pending) - self._hold[state]
        self._held = pending[cut:]
        return pending[:cut], None

    def _ended(self, pending: str, stop: str) -> str:
        self._held = ""
        return pending if self._include else pending[: len(pending) - len(stop)]

    def flush(self) -> str:
        """The end of the output: what was held back and became no stop string."""
        held, self._held = self._held, ""
        self._state = 0
        return held


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text to send now, and the stop string that it ends with (or before, where stops are excluded)."""

    text: str
    stop: str | None = None


class OutputText:
    """Detokenizer and StopMatcher in a row: ids of one generation in, text out."""

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher

    def push(self, token_id: int) -> TextPiece:
        """One token. If the result has a stop, this token completed it and is the last that counts."""
        return TextPiece(*self._matcher.push(self._detokenizer.push((token_id,))))

    def finish(self) -> TextPiece:
        """The end of the output. A cut character (U+FFFD) may itself complete a stop string; it counts as no token."""
        text, stop = self._matcher.push(self._detokenizer.flush(), num_tokens=0)
        return TextPiece(text + self._matcher.flush(), stop)
