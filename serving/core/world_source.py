"""A world as Python source, so that a failing one can be pasted into a test."""

from dataclasses import MISSING, fields, is_dataclass
from enum import Enum


def world_source(value: object, indent: int = 0) -> str:
    """An expression that gives an equal value: dataclasses with what differs from its default, enums by name."""
    pad = " " * (4 * indent + 4)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{field.name}={world_source(getattr(value, field.name), indent + 1)}"
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        ]
        name = type(value).__name__
        flat = f"{name}({', '.join(given)})"
        if len(flat) + 4 * indent < 110 and "\n" not in flat:
            return flat
        return f"{name}(\n" + "".join(f"{pad}{each},\n" for each in given) + " " * (4 * indent) + ")"
    if isinstance(value, tuple):
        parts = [world_source(each, indent + 1) for each in value]
        flat = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
        if len(flat) + 4 * indent < 110 and "\n" not in flat:
            return flat
        return "(\n" + "".join(f"{pad}{part},\n" for part in parts) + " " * (4 * indent) + ")"
    if isinstance(value, frozenset):
        parts = [world_source(each, indent + 1) for each in sorted(value)]
        return f"frozenset({{{', '.join(parts)}}})" if parts else "frozenset()"
    return repr(value)
