"""Chat messages to prompt ids, by the template in the model's own files.

A template is code from the model file; messages are text from clients. Neither may do what only the other may: no
template ever comes from a request, and the text of a control token in a message stays text.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from headrace.model.chat_messages import TOOL_FIELDS, ChatTemplateError, normalized
from headrace.model.checkpoint_files import fields_of
from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import GGUFFile, read_gguf
from headrace.model.template_sandbox import RaisedByTemplate, RenderLimits, TemplateEnvironment
from headrace.model.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "ChatTemplateError", "RenderLimits", "load_chat_template"]

MAX_SOURCE_CHARS = 1 << 20
_OWN_NAMES = frozenset((
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "unk_token", "pad_token", "strftime_now", "raise_exception", "chat_template", "tokenize",
))  # fmt: skip
"""What the server sets or withholds; no request may."""


class ChatTemplate:
    """A compiled template; safe to share between threads.

    now: what ``strftime_now`` shows. It does not move with the clock, since a date in the system turn would empty the
    prefix cache at midnight, and a prompt should not depend on when it is rendered.
    """

    def __init__(self, source: str, path: Path, *, now: datetime, limits: RenderLimits | None = None) -> None:
        """Raises: ModelFileError if the template cannot be compiled."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelFileError(
                path, f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}"
            )
        self._environment = TemplateEnvironment()
        self._limits = limits or RenderLimits()
        self._now = now
        try:
            self._template, names = self._environment.load(source)
        except Exception as error:
            # RecursionError and MemoryError come from deeply nested expressions.
            raise ModelFileError(path, f"the chat template cannot be compiled: {error!s:.300}") from None
        self.variables: frozenset[str] = names - _OWN_NAMES - self._environment.globals.keys()
        """Names that ``variables`` of ``render_ids`` may have: those that the template reads."""
        self.unread_fields: tuple[str, ...] = tuple(name for name in TOOL_FIELDS if name not in source)
        """Fields of messages that the template does not show to the model."""
        self.shows_date: bool = "strftime_now" in source
        """Whether prompts can depend on the day of the start."""
        self.content_hash: str = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()

    def render_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, str | int | float | bool] | None = None,
    ) -> list[int]:
        """Prompt ids of a conversation; the template alone decides on BOS. CPU work: not for an event loop.

        Control ids come from the template's own text only. A conversation without control text has exactly the ids of
        ``encode(rendered text, allow_special=True)``. In one with it, the stretches between the template's control
        tokens are encoded as ordinary text.

        Args:
          messages: see ``chat_messages.normalized``.
          add_generation_prompt: open the assistant's turn; None means yes unless continue_final_message.
          continue_final_message: leave the last message, which must be the assistant's, open at its end.
          variables: arguments of the template, each of which it must read.
        Raises: ChatTemplateError, TokenizationError.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        conversation = normalized(messages)
        if continue_final_message and conversation[-1]["role"] != "assistant":
            raise ChatTemplateError(
                "continue_final_message needs an assistant message at the end", message_index=len(conversation) - 1
            )
        self._check_variables(variables or {})
        marks = _Marks(tokenizer)

        def rendered(change: Callable[[str, bool], str]) -> str:
            changed = [
                {name: value if name == "role" else _map_texts(value, change) for name, value in message.items()}
                for message in conversation
            ]
            if continue_final_message:
                changed[-1]["content"] += marks.end
            text = self._render(
                tokenizer,
                changed,
                add_generation_prompt=not continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt,
                continue_final_message=continue_final_message,
                **_map_texts(dict(variables or {}), change),
            )
            return marks.until_end(text) if continue_final_message else text

        control = tokenizer.control_text
        seen = _Seen(tokenizer)
        _map_texts([conversation, dict(variables or {})], seen.look)
        if not seen.holds_control:
            text = rendered(lambda text, _: text)
            # A message and its neighbour may make a control text together.
            if not seen.may_straddle or control.count(text) == control.count(rendered(marks.hide)):
                return tokenizer.encode(text, allow_special=True)
        return marks.encode(rendered(marks.hide))

    def _check_variables(self, variables: Mapping[str, object]) -> None:
        for name, value in variables.items():
            if name not in self.variables:
                known = ", ".join(sorted(self.variables)) or "none"
                raise ChatTemplateError(f"the model's chat template has no argument {name!r:.60}; it has {known}")
            if not isinstance(value, str | int | float | bool):
                raise ChatTemplateError(f"template argument {name!r:.60} must be a string, number or boolean")

    def _render(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], **variables: Any) -> str:
        context = {
            "messages": messages,
            "bos_token": "" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
            "eos_token": "" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
            "strftime_now": self._now.strftime,
        }
        try:
            return self._environment.render(self._template, context | variables, self._limits)
        except RaisedByTemplate as error:
            raise ChatTemplateError(f"the model's chat template refuses the conversation: {error!s:.300}") from None
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template cannot render this: {error!s:.300}") from None
        except Exception as error:  # Anything that an expression in a template can raise in Python.
            reason = f"{type(error).__name__}: {error!s:.300}"
            raise ChatTemplateError(f"the model's chat template fails on this conversation: {reason}") from None


class _Seen:
    """What the texts of a conversation hold."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._control = tokenizer.control_text
        self.holds_control = False
        self.may_straddle = False
        self._looked_at: set[str] = set()

    def look(self, text: str, is_key: bool) -> str:
        """Once at each: keys and roles come back in every message."""
        if text in self._looked_at:
            return text
        self._looked_at.add(text)
        self.holds_control = self.holds_control or self._control.occurs_in(text)
        self.may_straddle = self.may_straddle or self._control.may_straddle(text)
        return text


class _Marks:
    """Stand-ins for control text while a template is rendered: private-use characters and digits, which survive
    trimming, changes of case and JSON, with 66 random bits that no message can foresee."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = f"{secrets.randbelow(10**20):020d}"
        self._hidden: list[str] = []
        self._pattern = re.compile(f"\ue000{self._nonce}([0-9]+)\ue001")
        self.end = f"\ue000{self._nonce}\ue001"

    def _mark(self, text: str) -> str:
        self._hidden.append(text)
        return f"\ue000{self._nonce}{len(self._hidden) - 1}\ue001"

    def hide(self, text: str, is_key: bool) -> str:
        """The text with a mark for each control text, and at both ends where it could be part of one.

        A key that merely lies inside some control text stays as it is, since templates look things up by name.
        """
        control = self._tokenizer.control_text
        border = self._mark("") if (control.touches if is_key else control.may_straddle)(text) else ""
        pieces = control.split(text)
        pieces[1::2] = map(self._mark, pieces[1::2])
        return border + "".join(pieces) + border

    def until_end(self, text: str) -> str:
        if text.count(self.end) != 1:
            raise ChatTemplateError("the model's chat template does not show the last message; it cannot be continued")
        return text[: text.index(self.end)]

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text with marks: control ids where the template wrote them, all else as ordinary text."""
        ids: list[int] = []
        for number, piece in enumerate(self._tokenizer.control_text.split(text)):
            if number % 2:
                ids.append(self._tokenizer.special_id(piece))
                continue
            plain = self._pattern.sub(lambda mark: self._hidden[int(mark[1])], piece)
            if self._nonce in plain:
                raise ChatTemplateError("the model's chat template cuts or changes a message with control text")
            ids.extend(self._tokenizer.encode(plain))
        return ids


def _map_texts(value: Any, change: Callable[[str, bool], str], is_key: bool = False) -> Any:
    """A copy of plain data with every text changed by ``change(text, is_key)``."""
    if isinstance(value, str):
        return change(value, is_key)
    if isinstance(value, Mapping):
        return {_map_texts(key, change, True): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def load_chat_template(
    source: str | os.PathLike[str] | GGUFFile, *, now: datetime | None = None, limits: RenderLimits | None = None
) -> ChatTemplate | None:
    """The chat template of a GGUF file, a Hugging Face model directory or a checkpoint of either; None if the model has
    none.

    now: frozen for ``strftime_now``; None is the local time of this call.
    Raises: ModelFileError.
    """
    path, text = _found_template(source)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ModelFileError(path, f"the chat template is {type(text).__name__}; it must be a string")
    return ChatTemplate(text, path, now=now or datetime.now(), limits=limits)


def _found_template(source: str | os.PathLike[str] | GGUFFile) -> tuple[Path, object]:
    if isinstance(source, GGUFFile):
        header = source
    elif not Path(source).is_dir():
        header = read_gguf(source)
    else:
        directory = ModelDirectory(source)
        fields = fields_of(directory)
        if fields is None:
            return _directory_template(directory)
        header = fields
    return header.path, header.fields.get("tokenizer.chat_template")


def _directory_template(directory: ModelDirectory) -> tuple[Path, object]:
    """chat_template.jinja, else the entry of tokenizer_config.json (of several, the one named "default")."""
    if directory.has("chat_template.jinja"):
        path = directory.file("chat_template.jinja")
        try:
            with open(path, encoding="utf-8") as file:
                return path, file.read(MAX_SOURCE_CHARS + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(path, f"cannot be read: {error!s:.200}") from None
    path = directory.path / "tokenizer_config.json"
    if not directory.has(path.name):
        return path, None
    value = directory.read_json(path.name).get("chat_template")
    if not isinstance(value, list):
        return path, value
    named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    if "default" not in named:
        raise ModelFileError(path, "has several chat templates and none named 'default'")
    return path, named["default"]
