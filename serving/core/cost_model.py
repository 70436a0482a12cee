"""How long a step takes: measured times of each program, fitted, with the spread that the fit leaves.

seconds = base + row x decode rows + token x prompt tokens + context x positions that rows attend to. What a fit leaves
is kept as quantiles of measured by predicted time, so that simulated times scatter as measured ones do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import Bucket, StepPlan

FORMAT = "headrace-cost-model/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What the time of a step depends on. context_tokens: sum over all rows of the positions that each attends to."""

    program: str
    rows: int
    prefill_tokens: int
    context_tokens: int


def program_name(bucket: Bucket) -> str:
    """Such as decode-4 or mixed-16x256."""
    tokens = f"x{bucket.prefill_tokens}" if bucket.prefill_tokens else ""
    return f"{bucket.kind.value}-{bucket.decode_rows}{tokens}"


def load_of(bucket: Bucket, decode_positions: Sequence[int], segments: Sequence[tuple[int, int]]) -> StepLoad:
    """segments: (start, tokens) of each prefill segment."""
    context = sum(position + 1 for position in decode_positions)
    context += sum(tokens * start + tokens * (tokens + 1) // 2 for start, tokens in segments)
    return StepLoad(
        program=program_name(bucket),
        rows=len(decode_positions),
        prefill_tokens=sum(tokens for _, tokens in segments),
        context_tokens=context,
    )


def load_of_plan(plan: StepPlan) -> StepLoad:
    positions = [row.position for row in plan.decode]
    return load_of(plan.bucket, positions, [(s.start, len(s.token_ids)) for s in plan.prefill])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """Seconds. spread: measured by predicted time at evenly spaced quantiles, ascending. num_steps: of the fit."""

    base_s: float
    row_s: float
    token_s: float
    context_s: float
    spread: tuple[float, ...]
    num_steps: int

    def seconds(self, load: StepLoad) -> float:
        """As predicted, without the spread."""
        work_s = self.row_s * load.rows + self.token_s * load.prefill_tokens + self.context_s * load.context_tokens
        return self.base_s + work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """programs: by program_name. host_s: quantiles of the time of the step loop between two steps. edge_s: quantiles of
    what a client waits for its first token beyond what the engine says, edge and network together.

    source: what was measured, in words. edge_is_measured: False = a stated constant.
    """

    programs: Mapping[str, ProgramCost]
    host_s: tuple[float, ...]
    edge_s: tuple[float, ...]
    source: str = ""
    edge_is_measured: bool = False
    context: Mapping[str, Any] = field(default_factory=dict)

    def program(self, name: str) -> ProgramCost:
        """Of a program that was never measured: the nearest of its kind, by tokens and rows, the larger of two."""
        found = self.programs.get(name)
        if found is not None:
            return found
        same = [other for other in self.programs if other.partition("-")[0] == name.partition("-")[0]]
        size = _size(name)
        nearest = min(same or self.programs, key=lambda other: (abs(_size(other) - size), -_size(other), other))
        return self.programs[nearest]

    def step_s(self, load: StepLoad, u: float) -> float:
        """u in [0, 1): which of the measured deviations it gets."""
        cost = self.program(load.program)
        return cost.seconds(load) * quantile(cost.spread, u)

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": self.source,
            "context": dict(self.context),
            "edge_is_measured": self.edge_is_measured,
            "host_s": list(self.host_s),
            "edge_s": list(self.edge_s),
            "programs": {name: asdict(cost) for name, cost in sorted(self.programs.items())},
        }


def cost_model_from_json(value: object, name: str) -> CostModel:
    """name: of the file, for errors. Raises: ConfigError naming it and the field."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{name} is no cost model: its format must be {FORMAT!r}; headrace cost-model writes one")
    programs = value.get("programs")
    if not isinstance(programs, dict) or not programs:
        raise ConfigError(f"{name}: programs must be an object with at least one program")
    return CostModel(
        programs={each: _program_from_json(cost, f"{name}: programs.{each}") for each, cost in programs.items()},
        host_s=_quantiles(value.get("host_s"), f"{name}: host_s"),
        edge_s=_quantiles(value.get("edge_s"), f"{name}: edge_s"),
        source=str(value.get("source", "")),
        edge_is_measured=value.get("edge_is_measured") is True,
        context=value["context"] if isinstance(value.get("context"), dict) else {},
    )


def quantile(values: Sequence[float], u: float) -> float:
    """Linear between evenly spaced quantiles. values: ascending, not empty. u in [0, 1]."""
    at = u * (len(values) - 1)
    low = min(int(at), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


def _size(name: str) -> int:
    rows, _, tokens = name.partition("-")[2].partition("x")
    return int(tokens or 0) + (int(rows) if rows.isdigit() else 0)


def _program_from_json(value: object, where: str) -> ProgramCost:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object")
    numbers = {}
    for name in ("base_s", "row_s", "token_s", "context_s"):
        number = value.get(name)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1e6:
            raise ConfigError(f"{where}.{name} must be a number of seconds, at least 0")
        numbers[name] = float(number)
    num_steps = value.get("num_steps")
    return ProgramCost(
        **numbers,
        spread=_quantiles(value.get("spread"), f"{where}.spread"),
        num_steps=num_steps if isinstance(num_steps, int) else 0,
    )


def _quantiles(value: object, where: str) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, list | tuple) else ()
    is_good = all(type(n) in (int, float) and isfinite(n) and n >= 0 for n in numbers)
    if not numbers or not is_good or list(numbers) != sorted(numbers):
        raise ConfigError(f"{where} must be a list of ascending numbers, at least 0, and not empty")
    return tuple(map(float, numbers))
