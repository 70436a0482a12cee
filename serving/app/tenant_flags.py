"""Options of ``headrace serve`` about tenants and limits: their command-line flags, and what their files say."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace.serving.app.help_sections import section
from headrace.serving.app.text_tools import TextTools
from headrace.serving.edge.keys import KeyRing
from headrace.serving.edge.prompt_ids import LocalEncoder
from headrace.serving.edge.shared_prefixes import DeclaredPrefix, SharedPrefixes, encode_prefixes, read_prefixes
from headrace.serving.edge.tenants import SETTINGS, Policies, SamePolicy, TenantFile

MAX_COUNT = 1_000_000_000

limits = section("Tenants and limits")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT = click.IntRange(1, MAX_COUNT)
_FLAGS = (
    limits(
        "--tenants",
        type=_FILE,
        help="TOML file of what tenants (names of keys) may use: tables [default] and [tenants.NAME] with any of "
        f"{', '.join(SETTINGS)}; read again when it changes.",
    ),
    limits(
        "--shared-prefixes",
        type=_FILE,
        help="TOML file of beginnings of prompts, [[prefix]] with name and system or text, whose cached KV all tenants "
        "share.",
    ),
    limits(
        "--first-token-ms",
        type=click.IntRange(1, 600_000),
        help="Objective for the first token: what would come later by estimate is refused with a retry hint instead of "
        "queued.  [default: none]",
    ),
    limits("--max-live-streams", type=_COUNT, help="Accepted requests, waiting and running.  [default: no limit]"),
    limits(
        "--max-tokens-in-flight",
        type=_COUNT,
        help="Tokens of all accepted requests, prompts and expected replies.  [default: no limit]",
    ),
    limits(
        "--max-live-pages",
        type=_COUNT,
        help="Pages of KV memory that all accepted requests will take by estimate.  [default: no limit]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """tenants, shared_prefixes: files; None = none. The others: see ``ServiceConfig``."""

    tenants: Path | None = None
    shared_prefixes: Path | None = None
    first_token_ms: int | None = None
    max_live_streams: int | None = None
    max_tokens_in_flight: int | None = None
    max_live_pages: int | None = None

    @classmethod
    def of_flags(cls, flags: dict[str, Any]) -> "LimitOptions":
        return cls(**{name: flags[name] for name in cls.__dataclass_fields__})

    def read_policies(self, keys: KeyRing | None) -> Policies:
        """Raises: ConfigError naming file, table, key, limit and remedy."""
        return SamePolicy() if self.tenants is None else TenantFile(self.tenants, () if keys is None else keys.names)

    def read_prefixes(self) -> tuple[DeclaredPrefix, ...]:
        """Raises: ConfigError naming file and entry."""
        return () if self.shared_prefixes is None else read_prefixes(self.shared_prefixes)

    def encode_prefixes(self, prefixes: tuple[DeclaredPrefix, ...], tools: TextTools) -> SharedPrefixes:
        """Blocks. Raises: ConfigError naming the entry."""
        if self.shared_prefixes is None:
            return SharedPrefixes()
        return encode_prefixes(self.shared_prefixes, prefixes, LocalEncoder(tools.tokenizer, tools.template))


def limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags, listed in their order."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command
