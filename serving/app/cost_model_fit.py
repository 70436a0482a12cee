"""Step times from a journal, fitted by program; what is left over is kept as a spread."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.cost_model import CostModel, ProgramCost, StepLoad, load_of
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.journal import Header, JournaledStep, JournalError, read_journal, read_steps

DEFAULT_EDGE_S = 0.003
"""From a client to the engine and back, where nothing was measured: a small prompt over loopback."""
NUM_QUANTILES = 41
MIN_STEPS = 12
"""Fewer steps of a program give it a constant, their median."""
NUM_ROUNDS = 12
"""Of reweighting; the fit has settled long before."""
HUBER = 1.345
"""In standard deviations: 95% as good as least squares on normal noise."""


@dataclass(frozen=True, slots=True)
class Measured:
    load: StepLoad
    seconds: float


def fit_cost_model(journal: Path, edge_ms: Sequence[float] | None) -> CostModel:
    """edge_ms: of each request, what its client waited for the first token beyond the engine's own time; None = not
    measured. Raises: ConfigError naming the file."""
    try:
        headers = [record for record in read_journal(journal) if isinstance(record, Header)]
        steps = list(read_steps(journal))
    except (OSError, JournalError) as error:
        raise ConfigError(f"the journal {journal} cannot be used: {error}") from None
    if not steps:
        raise ConfigError(f"the journal {journal} has no step that gave a result; put load on the server it is of")
    config = headers[-1].config
    if any(header.config != config or header.model_hash != headers[-1].model_hash for header in headers):
        raise ConfigError(f"the journal {journal} holds runs of different configurations or models; make one of each")
    measured, host_s = step_times(steps)
    by_program: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        by_program[each.load.program].append(each)
    return CostModel(
        programs={name: fit_program(group) for name, group in sorted(by_program.items())},
        host_s=quantiles(host_s or [0.0]),
        edge_s=quantiles([max(0.0, ms / 1e3) for ms in edge_ms]) if edge_ms else (DEFAULT_EDGE_S,),
        source=f"{len(measured)} steps of a journal that started {headers[0].started}",
        edge_is_measured=bool(edge_ms),
        context={
            "version": headers[-1].version,
            "model_hash": headers[-1].model_hash,
            "contract": headers[-1].contract,
            "config": msgspec.to_builtins(config),
        },
    )


def config_of(cost: CostModel, name: str) -> SchedulerConfig:
    """Of the server that was measured. name: of the file. Raises: ConfigError."""
    try:
        return msgspec.convert(cost.context.get("config"), SchedulerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: context.config is no configuration of a scheduler: {error}") from None


def step_times(steps: Sequence[JournaledStep]) -> tuple[list[Measured], list[float]]:
    """Seconds of each step, and of the loop between the end of one and the plan of the next while another one runs.

    A step begins when it is dispatched or, with another one in flight, when that one is done.
    """
    measured: list[Measured] = []
    host_s: list[float] = []
    before: JournaledStep | None = None
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        times, plan = step.times, step.plan
        if times.collected_s is None:
            continue
        start_s = times.dispatch_s
        if before is not None and before.segment == step.segment and before.times.collected_s is not None:
            start_s = max(start_s, before.times.collected_s)
        segments = [(start, tokens) for _, _, start, tokens, _ in plan.prefill]
        load = load_of(plan.bucket, [position for _, _, position in plan.decode], segments)
        measured.append(Measured(load, times.collected_s - start_s))
        if after is not None and after.segment == step.segment and after.times.collect_s is not None:
            is_overlapped = after.times.dispatch_s < times.collected_s
            host_s += [max(0.0, after.times.collect_s - times.collected_s)] if is_overlapped else []
        before = step
    return measured, host_s


def fit_program(group: Sequence[Measured]) -> ProgramCost:
    """Coefficients that are at least 0, by least squares of relative errors, with far ones counted for less."""
    seconds = np.array([max(1e-9, each.seconds) for each in group])
    columns = {
        "base_s": np.ones(len(group)),
        "row_s": np.array([each.load.rows for each in group], dtype=float),
        "token_s": np.array([each.load.prefill_tokens for each in group], dtype=float),
        "context_s": np.array([each.load.context_tokens for each in group], dtype=float),
    }
    found = dict.fromkeys(columns, 0.0)
    if len(group) < MIN_STEPS:
        found["base_s"] = float(np.median(seconds))
    else:
        used = [name for name, column in columns.items() if name == "base_s" or np.ptp(column) > 0]
        found.update(_fit(columns, used, seconds))
    predicted = sum(found[name] * column for name, column in columns.items())
    spread = quantiles(list(seconds / np.maximum(predicted, 1e-9)))
    return ProgramCost(**found, spread=spread, num_steps=len(group))


def _fit(columns: dict[str, Any], used: list[str], seconds: Any) -> dict[str, float]:
    """The column with the most negative coefficient leaves until none has one."""
    while True:
        matrix = np.stack([columns[name] for name in used], axis=1) / seconds[:, None]
        scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        weights = np.ones(len(seconds))
        solved = np.zeros(len(used))
        for _ in range(NUM_ROUNDS):
            root = np.sqrt(weights)
            solved = np.linalg.lstsq((matrix / scale) * root[:, None], root, rcond=None)[0] / scale
            error = np.abs(matrix @ solved - 1)
            deviation = max(1e-9, 1.4826 * float(np.median(error)))
            weights = np.minimum(1.0, HUBER * deviation / np.maximum(error, 1e-12))
        lowest = int(np.argmin(solved * scale))
        if solved[lowest] >= 0 or len(used) == 1:
            return {name: max(0.0, float(value)) for name, value in zip(used, solved, strict=True)}
        used = [name for i, name in enumerate(used) if i != lowest]


def quantiles(values: Sequence[float]) -> tuple[float, ...]:
    """NUM_QUANTILES evenly spaced ones, or all values where there are fewer."""
    if len(values) < NUM_QUANTILES:
        return tuple(sorted(float(value) for value in values))
    return tuple(float(q) for q in np.quantile(np.asarray(values), np.linspace(0, 1, NUM_QUANTILES)))
