"""O14: every shape of a message is rendered in full or refused with the index of the message; none is dropped."""

import itertools

import pytest

from tests.cases.case_client import CaseClient, Json, Refusal, strict

pytestmark = pytest.mark.usefixtures("checks")

ROLES = ("system", "user", "assistant", "tool", "developer")
HI = {"role": "user", "content": "hi"}
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM"
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}]


def rendered(client: CaseClient, *messages: Json) -> str | Refusal:
    """What the model would read."""
    answer = client.http.post("/tokenize", json={"messages": messages})
    if answer.status_code != 200:
        error = strict(answer.content)["error"]
        return Refusal(answer.status_code, error["code"], error["param"], error["message"])
    text: str = client.http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    return text


def shown(client: CaseClient, *messages: Json) -> str:
    text = rendered(client, *messages)
    assert isinstance(text, str), text
    return text


def test_texts_and_parts_are_rendered_the_same_way_for_every_role(client: CaseClient) -> None:
    parts = [{"type": "text", "text": "al"}, {"type": "text", "text": ""}, {"type": "text", "text": "pha"}]
    for role in ROLES:
        name = "system" if role == "developer" else role
        for content in ("alpha", parts, [{"type": "text", "text": "alpha"}]):
            text = shown(client, HI, {"role": role, "content": content})
            assert f"<|im_start|>{name}\nalpha<|im_end|>" in text
        assert f"<|im_start|>{name}\n<|im_end|>" in shown(client, HI, {"role": role, "content": ""})


def test_what_is_no_text_is_refused_by_index_for_every_role(client: CaseClient) -> None:
    image = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    wrong: list[object] = [None, 5, True, {}, [], ["a"], [{"type": "text"}], [{"type": "text", "text": 5}], image]
    for role, content in itertools.product(ROLES, wrong):
        refusal = rendered(client, HI, {"role": role, "content": content})
        assert isinstance(refusal, Refusal), (role, content)
        assert refusal.status == 400
        assert refusal.code in ("invalid_type", "invalid_message")
        assert refusal.param is not None and refusal.param.startswith("messages[1].content")
        assert "messages[1].content" in refusal.message
    for role in ROLES:
        assert isinstance(rendered(client, HI, {"role": role}), Refusal)


def test_roles_and_fields_that_nobody_knows(client: CaseClient) -> None:
    strange: list[tuple[Json, str]] = [
        ({"role": "Developer", "content": "x"}, "messages[1].role"),
        ({"role": "function", "content": "x"}, "messages[1].role"),
        ({"role": None, "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "contents": "y"}, "messages[1].contents"),
        ({"role": "user", "content": "x", "name": "Ada"}, "messages[1].name"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "messages[1].reasoning_content"),
        ({"role": "user", "content": "x", "tool_calls": CALLS}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "tool_call_id": "call_1"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[1].content"),
    ]
    for message, param in strange:
        refusal = rendered(client, HI, message)
        assert isinstance(refusal, Refusal), message
        assert (refusal.status, refusal.param) == (400, param)


def test_null_with_tool_calls_is_the_empty_text_and_what_is_not_read_is_named(client: CaseClient) -> None:
    """SmolLM2's template knows no tools: the calls are accepted and reported, the tool's answer is rendered."""
    history = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    text = shown(client, *history)
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>" in text
    unread = ["messages[1].tool_calls", "messages[2].tool_call_id"]
    body = {"messages": history, "max_tokens": 1, "temperature": 0}
    answer = client.post("chat", body)
    assert answer.headers["x-headrace-ignored-fields"] == ", ".join(unread)
    created = client.frames("chat", body)[0]
    assert created["ignored_fields"] == unread
    assert "ignored_fields" not in client.frames("chat", {"messages": [HI], "max_tokens": 1})[0]


def test_orders_of_turns(client: CaseClient) -> None:
    """Nothing is merged, moved or dropped; the default system turn comes only where none is first."""
    two = shown(client, {"role": "system", "content": "one"}, {"role": "system", "content": "two"}, HI)
    assert two.startswith("<|im_start|>system\none<|im_end|>\n<|im_start|>system\ntwo<|im_end|>\n<|im_start|>user\nhi")
    assert DEFAULT_SYSTEM not in two
    first = shown(client, {"role": "assistant", "content": "Hello."}, HI)
    assert DEFAULT_SYSTEM in first
    assert "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in first
    late = shown(client, HI, {"role": "system", "content": "late"})
    assert DEFAULT_SYSTEM in late
    assert "<|im_start|>system\nlate<|im_end|>" in late
