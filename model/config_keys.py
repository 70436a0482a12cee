"""Keys of one configuration file, each read once, so that what nobody read can be refused by name. JAX-free."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.model.errors import ModelFileError


class ConfigKeys:
    """Keys that start with prefix; ``refuse_rest`` names what nobody read. Raises: ModelFileError, naming the key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.rest = {key[len(prefix) :]: value for key, value in values.items() if key.startswith(prefix)}

    def fail(self, key: str, reason: str) -> ModelFileError:
        return ModelFileError(self.path, f"{self.prefix}{key} {reason}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.rest.pop(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # GGUF may repeat a number for every layer.
        if isinstance(value, list):
            raise self.fail(key, "differs between layers, which this family does not support")
        if type(value) is not int:
            raise self.fail(key, f"is {value!r:.60}; it must be an integer" if value is not None else "is missing")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.rest.pop(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.fail(key, f"is {value!r:.60}; it must be a finite number" if value is not None else "is missing")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.rest.pop(key, default)
        if type(value) is not bool:
            raise self.fail(key, f"is {value!r:.60}; it must be true or false")
        return value

    def demand(self, key: str, *allowed: object) -> None:
        """Refuse any value of an optional key but these."""
        if key not in self.rest:
            return
        value = self.rest.pop(key)
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
            names = " or ".join(repr(a) for a in allowed)
            raise self.fail(key, f"is {value!r:.60}, which is not supported; {names} is")

    def refuse_rest(self, inert: Iterable[str]) -> None:
        for key in sorted(self.rest.keys() - set(inert)):
            raise self.fail(key, f"(value {self.rest[key]!r:.60}) is not known to this version of Headrace")
