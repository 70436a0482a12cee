"""Prefixes of prompts that the operator declares to be common to all tenants, such as a product's system message.

Sharing cached KV between tenants is the operator's choice and never a caller's: a tenant that finds a page computed
learns that somebody sent that text. Of a declared text everybody may know it. The file is TOML:

    [[prefix]]
    name = "support"
    system = "You answer questions about the product."     # a system message, as the chat template renders it

    [[prefix]]
    name = "manual"
    text = "The manual: …"                                 # the beginning of a raw prompt
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.bodies import ChatPrompt
from headrace.serving.edge.errors import ApiError
from headrace.serving.edge.prompt_ids import PromptEncoder
from headrace.serving.edge.watched_file import read_text

MAX_PREFIXES = 256
MAX_BYTES = 4 << 20
_KEYS = frozenset({"name", "system", "text"})


@dataclass(frozen=True, slots=True)
class DeclaredPrefix:
    """Exactly one of system and text is set."""

    name: str
    system: str | None
    text: str | None


class SharedPrefixes:
    """Token ids of all declared prefixes."""

    def __init__(self, prefixes: tuple[tuple[int, ...], ...] = ()) -> None:
        self._prefixes = tuple(dict.fromkeys(prefixes))

    def num_shared(self, prompt_ids: tuple[int, ...]) -> int:
        """How many of the leading ids belong to a declared prefix: the longest match, in whole tokens.

        The end of a declared text may be cut otherwise in a prompt, where it grows together with what follows; what
        comes before it is matched all the same.
        """
        return max((_num_common(prefix, prompt_ids) for prefix in self._prefixes), default=0)


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])


def read_prefixes(path: Path) -> tuple[DeclaredPrefix, ...]:
    """Raises ConfigError naming file, entry, key and remedy; it repeats no text."""
    try:
        document = tomllib.loads(read_text(path, "file of shared prefixes", MAX_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the file of shared prefixes {path} is not TOML: {error}") from None
    entries = document.get("prefix")
    if set(document) != {"prefix"} or not isinstance(entries, list):
        raise ConfigError(f"{path} must hold entries [[prefix]] and nothing else")
    if len(entries) > MAX_PREFIXES:
        raise ConfigError(f"{path} has {len(entries)} prefixes; at most {MAX_PREFIXES} are supported")
    prefixes = tuple(_entry(path, number, entry) for number, entry in enumerate(entries, 1))
    names = [prefix.name for prefix in prefixes]
    for number, name in enumerate(names, 1):
        if name in names[: number - 1]:
            raise ConfigError(f"{path} prefix {number}: another one has the same name; give it one of its own")
    return prefixes


def _entry(path: Path, number: int, entry: Any) -> DeclaredPrefix:
    where = f"{path} prefix {number}"
    if not isinstance(entry, dict) or not set(entry) <= _KEYS:
        raise ConfigError(f"{where}: an entry has name, and either system or text, and nothing else")
    for key in ("name", "system", "text"):
        if key in entry and (not isinstance(entry[key], str) or not entry[key]):
            raise ConfigError(f"{where}: {key} must be a string that is not empty")
    if "name" not in entry:
        raise ConfigError(f"{where}: name is missing")
    if ("system" in entry) == ("text" in entry):
        raise ConfigError(f"{where}: give either system (a system message of chats) or text (of raw prompts)")
    return DeclaredPrefix(entry["name"], entry.get("system"), entry.get("text"))


def encode_prefixes(
    path: str | os.PathLike[str], prefixes: tuple[DeclaredPrefix, ...], encoder: PromptEncoder
) -> SharedPrefixes:
    """Blocks. Raises ConfigError where the model's template refuses one."""
    return SharedPrefixes(tuple(_ids(path, prefix, encoder) for prefix in prefixes))


def _ids(path: str | os.PathLike[str], prefix: DeclaredPrefix, encoder: PromptEncoder) -> tuple[int, ...]:
    try:
        if prefix.text is not None:
            return tuple(encoder.text_ids(prefix.text, add_special=True))
        chat = ChatPrompt(
            messages=({"role": "system", "content": prefix.system or ""},),
            add_generation_prompt=False,
            continue_final_message=False,
            variables={},
        )
        return tuple(encoder.chat_ids(chat))
    except ApiError as error:
        raise ConfigError(f"{os.fspath(path)} prefix {prefix.name!r} cannot be encoded: {error.message}") from None
