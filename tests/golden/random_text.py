"""Seeded random Unicode strings and their digest, shared by the script that records the digest and the test.

Only ``random.random()`` is used: the documentation promises its sequence for a seed in every version of Python.
"""

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence

SEED = 20240817
NUM_STRINGS = 10_000

# Blocks of code points (first, last), from the commonplace to the rare; surrogates are no characters and stay out.
_BLOCKS = (
    (0x20, 0x7E), (0x20, 0x7E), (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x370, 0x3FF),
    (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F), (0x2000, 0x206F),
    (0x2150, 0x218F), (0x2460, 0x24FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF),
    (0xFE00, 0xFE0F), (0xFFF0, 0xFFFF), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF),
    (0x40000, 0x4FFFF), (0xE0000, 0xE007F), (0x10FF00, 0x10FFFF),
)  # fmt: skip
_PIECES = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "'s", "'ll", "12", "007", "3.14", " 42",
    "²⅓", "the", " and", "def f(x):", "<|im_start|", "|im_end|>", "👨\u200d👩\u200d👧\u200d👦", "🇫🇷", "e\u0301",
    "نعم", "สวัสดี",
)  # fmt: skip


def random_strings(count: int = NUM_STRINGS, seed: int = SEED) -> Iterator[str]:
    """Strings of 0 to 40 parts: characters of one or many blocks, and pieces that tokenizers treat specially."""
    rng = random.Random(seed)

    def below(n: int) -> int:
        return int(rng.random() * n)

    for _ in range(count):
        own_block = _BLOCKS[below(len(_BLOCKS))]
        parts = []
        for _ in range(below(41)):
            kind = rng.random()
            if kind < 0.25:
                parts.append(_PIECES[below(len(_PIECES))])
            else:
                first, last = own_block if kind < 0.7 else _BLOCKS[below(len(_BLOCKS))]
                parts.append(chr(first + below(last - first + 1)))
        yield "".join(parts)


def ids_digest(rows: Iterable[Sequence[int]]) -> str:
    """SHA-256 over rows of ids, each written as decimal numbers with spaces and a newline."""
    digest = hashlib.sha256()
    for ids in rows:
        digest.update((" ".join(map(str, ids)) + "\n").encode())
    return digest.hexdigest()
