"""Strict checks of one JSON value. A bool is never a number, a string never a number, nothing is rounded or cut.

Errors name the field and the limit and never repeat the value (it may be huge, or a secret).
"""

import math
from dataclasses import dataclass

from headrace.serving.edge.errors import ApiError, ErrorCode

MAX_TOKEN_IDS = 1 << 20
"""Of one list; beyond any context."""

_JSON_TYPES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def json_type(value: object) -> str:
    """How error texts name the type of a value."""
    return _JSON_TYPES.get(type(value), "a number")


def wrong_type(name: str, wanted: str, value: object) -> ApiError:
    return ApiError(ErrorCode.INVALID_TYPE, f"{name} must be {wanted}; it was {json_type(value)}.", param=name)


def out_of_range(name: str, wanted: str, *, param: str | None = None) -> ApiError:
    return ApiError(ErrorCode.INVALID_VALUE, f"{name} must be {wanted}.", param=param or name)


@dataclass(frozen=True, slots=True)
class Flag:
    def describe(self) -> str:
        return "boolean"

    def check(self, name: str, value: object) -> bool:
        if type(value) is not bool:
            raise wrong_type(name, "a boolean", value)
        return value


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer in [low, high]; 5.0 is not one."""

    low: int
    high: int | None = None

    def describe(self) -> str:
        return f"integer, {self._range()}"

    def _range(self) -> str:
        return f"at least {self.low}" if self.high is None else f"{self.low} to {self.high}"

    def check(self, name: str, value: object) -> int:
        if type(value) is not int:
            raise wrong_type(name, "an integer", value)
        if value < self.low or (self.high is not None and value > self.high):
            raise out_of_range(name, f"an integer, {self._range()}")
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A finite number in [low, high], or in (low, high] with above_low."""

    low: float
    high: float
    above_low: bool = False

    def describe(self) -> str:
        return f"number, {self._range()}"

    def _range(self) -> str:
        return f"{'above' if self.above_low else 'from'} {self.low:g} to {self.high:g}"

    def check(self, name: str, value: object) -> float:
        if type(value) is not float and type(value) is not int:
            raise wrong_type(name, "a number", value)
        number = _finite(name, value)
        if not self.low <= number <= self.high or (self.above_low and number == self.low):
            raise out_of_range(name, f"a number {self._range()}")
        return number + 0.0  # -0.0 becomes 0.0


def _finite(name: str, value: float, *, param: str | None = None) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise out_of_range(name, "a finite number", param=param)
    return number


@dataclass(frozen=True, slots=True)
class Text:
    max_chars: int

    def describe(self) -> str:
        return f"string, at most {self.max_chars} characters"

    def check(self, name: str, value: object) -> str:
        if type(value) is not str:
            raise wrong_type(name, "a string", value)
        if len(value) > self.max_chars:
            raise out_of_range(name, f"at most {self.max_chars} characters long")
        return value


@dataclass(frozen=True, slots=True)
class StopStrings:
    """One string or a list; each of 1..max_chars characters; given twice counts once."""

    max_items: int
    max_chars: int

    def describe(self) -> str:
        return f"string or array of at most {self.max_items} strings, each 1 to {self.max_chars} characters"

    def check(self, name: str, value: object) -> tuple[str, ...]:
        items = [value] if type(value) is str else value
        if type(items) is not list:
            raise wrong_type(name, "a string or an array of strings", value)
        if len(items) > self.max_items:
            raise out_of_range(name, f"at most {self.max_items} strings")
        for position, item in enumerate(items):
            if type(item) is not str:
                raise wrong_type(f"{name}[{position}]", "a string", item)
            if not 1 <= len(item) <= self.max_chars:
                raise out_of_range(f"{name}[{position}]", f"1 to {self.max_chars} characters long")
        return tuple(dict.fromkeys(items))


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Token ids; admission checks them against the vocabulary."""

    min_items: int
    max_items: int

    def describe(self) -> str:
        return f"array of {self.min_items} to {self.max_items} token ids"

    def check(self, name: str, value: object) -> tuple[int, ...]:
        if type(value) is not list:
            raise wrong_type(name, "an array of token ids", value)
        if not self.min_items <= len(value) <= self.max_items:
            raise out_of_range(name, f"an array of {self.min_items} to {self.max_items} token ids")
        return token_ids(name, value)


def token_ids(name: str, items: list[object]) -> tuple[int, ...]:
    """Items as ids in [0, 2**31); whether the vocabulary has them is admission's business.

    The common case runs at C speed: 4 MiB of JSON can hold two million ids.
    """
    if len(items) > MAX_TOKEN_IDS:
        raise out_of_range(name, f"at most {MAX_TOKEN_IDS} token ids")
    ids: tuple[int, ...] = tuple(items)  # type: ignore[arg-type]  # checked in the next lines
    if set(map(type, items)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < 1 << 31:
        return ids
    for position, item in enumerate(items):
        if type(item) is not int:
            raise wrong_type(f"{name}[{position}]", "a token id (an integer)", item)
        if not 0 <= item < 1 << 31:
            raise out_of_range(f"{name}[{position}]", "a token id of the model's vocabulary")
    raise AssertionError("unreachable: one of the items is no token id")


@dataclass(frozen=True, slots=True)
class BiasMap:
    """{"token id": bias}; keys are decimal strings as JSON wants them."""

    max_items: int
    limit: float

    def describe(self) -> str:
        return (
            f"object of at most {self.max_items} entries, token id to a number from -{self.limit:g} to {self.limit:g}"
        )

    def check(self, name: str, value: object) -> tuple[tuple[int, float], ...]:
        if type(value) is not dict:
            raise wrong_type(name, "an object of token ids and numbers", value)
        if len(value) > self.max_items:
            raise out_of_range(name, f"at most {self.max_items} entries")
        bound = Real(-self.limit, self.limit)
        pairs: dict[int, float] = {}
        for key, bias in value.items():
            if not (type(key) is str and key.isascii() and key.isdigit() and len(key) <= 10):
                raise ApiError(ErrorCode.INVALID_VALUE, f"A key of {name} is not a token id in decimal.", param=name)
            if int(key) in pairs:
                raise ApiError(ErrorCode.INVALID_VALUE, f"{name} names token id {int(key)} twice.", param=name)
            pairs[int(key)] = bound.check(f"{name}.{int(key)}", bias)
        return tuple(pairs.items())


@dataclass(frozen=True, slots=True)
class ScalarMap:
    """{"name": scalar}; null values are left out. Which names there are is for whoever knows the template."""

    max_items: int
    max_chars: int

    def describe(self) -> str:
        return f"object of at most {self.max_items} strings (at most {self.max_chars} characters), numbers or booleans"

    def check(self, name: str, value: object) -> dict[str, str | int | float | bool]:
        if type(value) is not dict:
            raise wrong_type(name, "an object", value)
        if len(value) > self.max_items:
            raise out_of_range(name, f"at most {self.max_items} entries")
        for item in value.values():
            if isinstance(item, dict | list) or (type(item) is str and len(item) > self.max_chars):
                raise out_of_range(f"The values of {name}", self.describe().partition(" of ")[2], param=name)
            if type(item) is int or type(item) is float:
                _finite(f"A value of {name}", item, param=name)
        return {key: item for key, item in value.items() if item is not None}


@dataclass(frozen=True, slots=True)
class Shaped:
    """A value with a parser of its own in ``bodies``; this only describes it and passes it through."""

    text: str

    def describe(self) -> str:
        return self.text

    def check(self, name: str, value: object) -> object:
        return value


@dataclass(frozen=True, slots=True)
class OnlyDefault:
    """Accepts what stands for "not used" and nothing else. place: where it is given instead of in a body; "" = it is
    not supported at all."""

    values: tuple[object, ...]
    place: str = ""

    def describe(self) -> str:
        shown = ["null", *(_as_json(value) for value in self.values)]
        return "only " + " or ".join(shown)

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(known) and value == known for known in self.values)

    def check(self, name: str, value: object) -> None:
        if not self.accepts(value):
            text = f"{name} is not supported by this version: leave it out, or send {self.describe()}."
            if self.place:
                text = f"{name} is no field of a body here: give it as {self.place}, and leave it out of the body."
            raise ApiError(ErrorCode.UNSUPPORTED_FIELD, text, param=name)


def _as_json(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else "{}" if value == {} else str(value).replace("'", '"')


Kind = Flag | Whole | Real | Text | StopStrings | TokenIds | BiasMap | ScalarMap | Shaped | OnlyDefault
