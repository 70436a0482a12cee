"""Policies of tenants: a TOML file with a table [default] and a table [tenants.NAME] for each key name that differs.

A tenant's table changes what [default] says. The file is read again when it changes; one that cannot be used then
leaves the policies as they were and is logged.
"""

import logging
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.rate_limit import Rate
from headrace.serving.core.tenant_policy import Budget, BudgetLimits, TenantPolicy
from headrace.serving.edge.keys import MAX_KEYS
from headrace.serving.edge.terms import MAX_DEADLINE_MS, PRIORITIES
from headrace.serving.edge.watched_file import WatchedFile, read_text

FILE = "tenant file"
MAX_BYTES = 1 << 20
MAX_COUNT = 1_000_000_000
WEIGHTS = (0.001, 1000.0)
RATES = (0.001, 1e9)

_log = logging.getLogger("headrace.tenants")


class Policies(Protocol):
    def of(self, tenant: str) -> TenantPolicy: ...


class SamePolicy:
    """One policy for everybody."""

    def __init__(self, policy: TenantPolicy = TenantPolicy()) -> None:
        self._policy = policy

    def of(self, tenant: str) -> TenantPolicy:
        return self._policy


class TenantFile:
    """The policies of one file. key_names: of the server's keys; a table for another tenant is a slip of the pen. Later
    the keys may change before or after this file, so names are then no longer held against them. None: there are no
    keys to hold them against."""

    def __init__(
        self, path: Path, key_names: Collection[str] | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigError naming file, table, key, limit and remedy."""
        self._file = WatchedFile(
            path, read_policies, what=FILE, of="the policies of tenants", log=_log, clock=clock, is_slow=True
        )
        unknown = [] if key_names is None else sorted(set(self._file.value[1]) - set(key_names))
        if unknown:
            known = ", ".join(sorted(key_names or ())) or "none: without --api-keys only [default] counts"
            raise ConfigError(f"{path} [tenants.{unknown[0]}]: no key has that name; the keys' names are {known}")

    def of(self, tenant: str) -> TenantPolicy:
        default, tenants = self._file.value
        return tenants.get(tenant, default)


def read_policies(path: Path) -> tuple[TenantPolicy, dict[str, TenantPolicy]]:
    """The default, and those that differ by tenant. Raises ConfigError."""
    document = _document(path)
    for name in document:
        if name not in ("default", "tenants"):
            raise ConfigError(f"{path}: unknown table [{_shown(name)}]; there are [default] and [tenants.NAME]")
    default = _table(path, "default", document.get("default", {}))
    tables = document.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path} [tenants]: write a table [tenants.NAME] for each tenant")
    if len(tables) > MAX_KEYS:
        raise ConfigError(f"{path} has {len(tables)} tenants; at most {MAX_KEYS} are supported")
    policies = {
        name: _policy(path, f"tenants.{name}", {**default, **_table(path, f"tenants.{name}", table)})
        for name, table in tables.items()
    }
    return _policy(path, "default", default), policies


@dataclass(frozen=True, slots=True)
class _Number:
    """In [low, high]; is_whole: an integer."""

    low: float
    high: float
    is_whole: bool = False

    def check(self, where: str, value: object) -> None:
        kind = "an integer" if self.is_whole else "a number"
        is_number = type(value) is int or (type(value) is float and not self.is_whole)
        if not is_number or not self.low <= value <= self.high:  # type: ignore[operator]
            raise ConfigError(f"{where} must be {kind} from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True)
class _OneOf:
    values: tuple[object, ...]

    def check(self, where: str, value: object) -> None:
        if not any(type(value) is type(known) and value == known for known in self.values):
            shown = (f'"{v}"' if isinstance(v, str) else str(v).lower() for v in self.values)
            raise ConfigError(f"{where} must be one of {', '.join(shown)}")


_COUNT = _Number(1, MAX_COUNT, is_whole=True)
SETTINGS: Mapping[str, _Number | _OneOf] = {
    "weight": _Number(*WEIGHTS),
    "max_priority": _OneOf(tuple(PRIORITIES)),
    **{budget.value: _COUNT for budget in Budget},
    "requests_per_second": _Number(*RATES),
    "request_burst": _COUNT,
    "tokens_per_second": _Number(*RATES),
    "token_burst": _COUNT,
    "deadline_ms": _Number(1, MAX_DEADLINE_MS, is_whole=True),
    "sees_tenants": _OneOf((True, False)),
}


def _table(path: Path, name: str, table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path} [{_shown(name)}] must be a table of settings")
    for key, value in table.items():
        kind = SETTINGS.get(key)
        if kind is None:
            raise ConfigError(
                f"{path} [{_shown(name)}]: unknown setting {_shown(key)}; the settings are {', '.join(SETTINGS)}"
            )
        kind.check(f"{path} [{_shown(name)}] {key}", value)
    return table


def _policy(path: Path, name: str, values: Mapping[str, Any]) -> TenantPolicy:
    return TenantPolicy(
        weight=float(values.get("weight", 1.0)),
        max_priority=PRIORITIES[values.get("max_priority", "high")],
        limits=BudgetLimits(**{budget.value: values.get(budget.value) for budget in Budget}),
        requests=_rate(path, name, values, "requests_per_second", "request_burst"),
        tokens=_rate(path, name, values, "tokens_per_second", "token_burst"),
        deadline_ms=values.get("deadline_ms"),
        sees_tenants=values.get("sees_tenants", False),
    )


def _rate(path: Path, name: str, values: Mapping[str, Any], rate: str, burst: str) -> Rate | None:
    """A burst that is not given is what comes in a second, at least 1."""
    if rate in values:
        per_second = float(values[rate])
        return Rate(per_second, float(values.get(burst, max(1.0, per_second))))
    if burst in values:
        raise ConfigError(f"{path} [{_shown(name)}] {burst} needs {rate}: a bucket is refilled at a rate")
    return None


def _shown(name: str) -> str:
    return name if len(name) <= 64 and name.isprintable() else "(unprintable)"


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, FILE, MAX_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the {FILE} {path} is not TOML: {error}") from None
