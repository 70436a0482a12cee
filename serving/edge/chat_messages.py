"""Chat messages from a body, checked: what is accepted reaches the template, what would be dropped is refused.

Errors name the message by its index. Content parts of type text are concatenated without a separator, for every role
alike.
"""

from collections.abc import Callable

from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import MAX_MESSAGES, unknown_field
from headrace.serving.edge.values import wrong_type

ROLES = ("system", "developer", "user", "assistant", "tool")
"""developer becomes system, the name that open models were trained with."""
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128

Message = dict[str, object]

_CONTENT_FIELDS = ("role", "content", "tool_calls", "tool_call_id")
_NULL_ONLY_FIELDS = ("name", "refusal", "audio", "function_call", "annotations", "reasoning", "reasoning_content")
"""What SDKs echo back from an answer as nulls; a value in them would be lost, so only null passes."""
_KNOWN = dict.fromkeys(_CONTENT_FIELDS + _NULL_ONLY_FIELDS)
_MEDIA_PARTS = ("image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file")


def parse_messages(value: object) -> tuple[Message, ...]:
    """1..MAX_MESSAGES messages, each with a role and string content. Raises ApiError."""
    if type(value) is not list:
        raise wrong_type("messages", "an array of messages", value)
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise ApiError(ErrorCode.INVALID_VALUE, f"messages must hold 1 to {MAX_MESSAGES} messages.", param="messages")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(where: str, value: object) -> Message:
    if type(value) is not dict:
        raise wrong_type(where, "an object", value)
    role = value.get("role")
    if type(role) is not str or role not in ROLES:
        raise _invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    _refuse_other_fields(where, value)
    message: Message = {"role": role}
    calls = value.get("tool_calls")
    if calls:
        if role != "assistant":
            raise _invalid(f"{where}.tool_calls", "belongs to assistant messages only")
        message["tool_calls"] = _tool_calls(f"{where}.tool_calls", calls)
    elif calls is not None and type(calls) is not list:
        raise wrong_type(f"{where}.tool_calls", "an array", calls)
    call_id = value.get("tool_call_id")
    if call_id is not None:
        if role != "tool" or type(call_id) is not str or len(call_id) > 256:
            raise _invalid(f"{where}.tool_call_id", "must be a string of at most 256 characters, in tool messages only")
        message["tool_call_id"] = call_id
    message["content"] = _content(f"{where}.content", value.get("content"), may_be_null="tool_calls" in message)
    return message


def _refuse_other_fields(where: str, value: dict[str, object]) -> None:
    for name, item in value.items():
        if name not in _KNOWN:
            raise unknown_field(name, _KNOWN, f"{where}.")
        if name in _NULL_ONLY_FIELDS and item is not None and item != []:
            raise ApiError(
                ErrorCode.UNSUPPORTED_FIELD,
                f"{where}.{name} is not supported by this version: leave it out, or send null.",
                param=f"{where}.{name}",
            )


def _content(where: str, value: object, *, may_be_null: bool) -> str:
    if value is None and may_be_null:
        return ""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(where, "a string or an array of text parts", value)
    if not 1 <= len(value) <= MAX_PARTS:
        raise _invalid(where, f"must hold 1 to {MAX_PARTS} parts")
    return "".join(_part(f"{where}[{index}]", item) for index, item in enumerate(value))


def _part(where: str, value: object) -> str:
    if type(value) is not dict:
        raise wrong_type(where, "an object", value)
    kind, text = value.get("type"), value.get("text")
    if kind in _MEDIA_PARTS:
        raise _invalid(where, f"is of type {kind}; this model reads text parts only")
    if kind != "text":
        raise _invalid(where, 'must be a part of type "text"')
    if type(text) is not str:
        raise wrong_type(f"{where}.text", "a string", text)
    for name in value:
        if name not in ("type", "text"):
            raise unknown_field(name, {"type": None, "text": None}, f"{where}.")
    return text


def _tool_calls(where: str, value: object) -> list[dict[str, object]]:
    if type(value) is not list:
        raise wrong_type(where, "an array", value)
    if len(value) > MAX_TOOL_CALLS:
        raise _invalid(where, f"must hold at most {MAX_TOOL_CALLS} calls")
    return [_tool_call(f"{where}[{index}]", item) for index, item in enumerate(value)]


def _tool_call(where: str, value: object) -> dict[str, object]:
    """{"id", "type": "function", "function": {"name", "arguments"}}: strings only."""
    call = _strings(where, value, ("id", "type"), nested="function")
    if call["type"] != "function":
        raise _invalid(f"{where}.type", 'must be "function"')
    assert isinstance(value, dict)  # _strings has checked it
    return {**call, "function": _strings(f"{where}.function", value.get("function"), ("name", "arguments"))}


def _strings(where: str, value: object, names: tuple[str, ...], *, nested: str = "") -> dict[str, object]:
    if type(value) is not dict:
        raise wrong_type(where, "an object", value)
    for name in value:
        if name not in names and name not in (nested, "index"):
            raise unknown_field(name, dict.fromkeys(names), f"{where}.")
    result: dict[str, object] = {}
    for name in names:
        item = value.get(name)
        if type(item) is not str:
            raise wrong_type(f"{where}.{name}", "a string", item)
        result[name] = item
    return result


def _invalid(where: str, problem: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_MESSAGE, f"{where} {problem}.", param=where)


def texts(message: Message) -> list[str]:
    """Every text of a message, for limits on bytes."""
    found: list[str] = []
    _collect(message, found.append)
    return found


def _collect(value: object, take: Callable[[str], None]) -> None:
    if isinstance(value, str):
        take(value)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, take)
    elif isinstance(value, list):
        for item in value:
            _collect(item, take)
