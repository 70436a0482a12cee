"""How long the result of an operation in a chat template can be, asked before it runs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MAX_NUMBER = 1_000_000
"""Largest integer operand of a repetition, a width, a count."""
MAX_INDENT = 64
_LARGE_WIDTH = re.compile(r"\d{5}")
_ALLOWED_TEXT_METHODS = frozenset(
    """capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit islower
    isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex
    rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill""".split()  # noqa: SIM905
)


class TooLarge(ValueError):
    """An operation that is refused whatever its operands are, or for one of them."""


def _small(*values: Any, limit: int = MAX_NUMBER) -> int:
    """The product of those values that are numbers, each at most the limit."""
    product = 1
    for value in values:
        if isinstance(value, int):
            if abs(value) > limit:
                raise TooLarge(f"it uses the number {value!r:.30} as a size; the limit is {limit}")
            product *= max(value, 1)
    return product


def _formatted(text: str, values: Sequence[Any]) -> int:
    if _LARGE_WIDTH.search(text) or "*" in text:
        raise TooLarge("it formats with a width of more than four digits, or one that is computed")
    return 10_000 * (text.count("%") + text.count("{")) + len(text) + _length(values)


def _length(value: Any) -> int:
    """Characters in a text, or in the texts of a flat list."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(len(item) for item in value if isinstance(item, str))
    return 0


def _replaced(text: str, args: Sequence[Any]) -> int:
    if len(args) < 2 or not isinstance(args[0], str) or not isinstance(args[1], str):
        return len(text)
    return len(text) + text.count(args[0]) * len(args[1])


def _joined(separator: str, items: Any) -> int:
    if not isinstance(items, str | list | tuple):
        raise TooLarge("it joins what has no length; join a list")
    return len(separator) * len(items) + _length(items)


def estimate_binop(operator: str, left: Any, right: Any) -> int:
    """Raises: TooLarge."""
    if operator == "**":
        raise TooLarge("it uses the operator **")
    if operator == "*":
        size = _small(left, right)
        for items in (left, right):
            if isinstance(items, str | list | tuple):
                return size * max(len(items), _length(items))
        return 0
    if operator == "%" and isinstance(left, str):
        return _formatted(left, right if isinstance(right, tuple) else (right,))
    return _length(left) + _length(right) if operator == "+" else 0


def estimate_method(text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A method of a text. Raises: TooLarge."""
    if name not in _ALLOWED_TEXT_METHODS:
        raise TooLarge(f"it uses the text method {name!r:.30}")
    if name == "format":
        return _formatted(text, [*args, *kwargs.values()])
    if name == "replace":
        return _replaced(text, args)
    if name == "join":
        return _joined(text, args[0] if args else ())
    return len(text) + _small(*args, *kwargs.values())


def estimate_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A filter; args[0] is the value. Raises: TooLarge."""
    value, rest = args[0], [*args[1:], *kwargs.values()]
    if name == "indent":
        width = next((item for item in rest if isinstance(item, str | int) and not isinstance(item, bool)), 4)
        width = len(width) if isinstance(width, str) else _small(width, limit=MAX_INDENT)
        return _length(value) + width * (value.count("\n") + 1 if isinstance(value, str) else 1)
    if name == "tojson":
        _small(*rest, limit=MAX_INDENT)
        return 0
    if name == "format":
        return _formatted(value, rest) if isinstance(value, str) else 0
    if name == "replace":
        return _replaced(value, rest) if isinstance(value, str) else 0
    if name == "join":
        separator = next((item for item in rest if isinstance(item, str)), "")
        return _joined(separator, value)
    _small(*rest)
    return 0
