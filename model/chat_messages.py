"""Chat messages in the one form that templates get, whatever form the client chose."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_FIELDS = ("tool_calls", "tool_call_id")
"""Templates of models that were not trained with tools do not read these."""
_FIELDS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"))


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered.

    message_index: which message is at fault, counted from 0, or None. param: the field in the style of a path.
    """

    def __init__(self, message: str, *, message_index: int | None = None) -> None:
        self.message_index = message_index
        super().__init__(message)

    @property
    def param(self) -> str:
        return "messages" if self.message_index is None else f"messages[{self.message_index}]"


def normalized(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text content, plain types and no null values.

    Text parts are joined without a separator, for every role. Null or missing content is the empty text where the
    message has tool calls. "developer" becomes "system", which is the name that open models were trained with.
    Arguments of tool calls become objects where they are JSON objects, as templates expect.
    Raises: ChatTemplateError naming the message.
    """
    if not messages:
        raise ChatTemplateError("messages is empty; it must have at least one message")
    return [_message(index, message) for index, message in enumerate(messages)]


def _refuse(index: int, reason: str) -> NoReturn:
    raise ChatTemplateError(f"messages[{index}]{reason}", message_index=index)


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(index, f" is {type(message).__name__}; it must be an object")
    for name in message.keys() - _FIELDS:
        _refuse(index, f" has an unknown field {name!r:.60}; known are {', '.join(sorted(_FIELDS))}")
    result = {name: value for name, value in message.items() if value is not None}
    role = result.get("role")
    if role not in ROLES:
        _refuse(index, f".role is {role!r:.60}; it must be one of {', '.join(ROLES)}")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(result.get(name, ""), str):
            _refuse(index, f".{name} must be a string")
    calls = result.pop("tool_calls", None)
    if calls is not None and (role != "assistant" or not isinstance(calls, list)):
        _refuse(index, ".tool_calls must be a list, in an assistant message")
    if calls:
        result["tool_calls"] = [_tool_call(index, call) for call in calls]
    result["role"] = "system" if role == "developer" else role
    result["content"] = _content(index, result.get("content"), has_calls=bool(calls))
    return result


def _content(index: int, content: Any, *, has_calls: bool) -> str:
    if content is None and has_calls:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        what = "null or missing" if content is None else "empty" if content == [] else type(content).__name__
        _refuse(index, f".content is {what}; it must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            what = f"has type {kind!r:.60}" if kind != "text" else "has no text"
            _refuse(index, f".content[{number}] {what}; only parts of type 'text' are supported")
        texts.append(text)
    return "".join(texts)


def _tool_call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(index, ".tool_calls must hold objects with a function that has a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, Mapping):
        _refuse(index, ".tool_calls must have arguments that are an object or a string")
    rest = {name: value for name, value in call.items() if value is not None}
    return rest | {"function": dict(function) | {"arguments": arguments}}
