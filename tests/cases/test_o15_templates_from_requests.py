"""O15: no template and no internal option comes from a request; rendering never holds up the others."""

import threading

import pytest

from tests.cases.case_client import CaseClient, Json

pytestmark = pytest.mark.usefixtures("checks")

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def test_a_template_in_the_body_is_refused_wherever_it_stands(client: CaseClient) -> None:
    places: list[tuple[Json, str, str]] = [
        ({"chat_template": ENDLESS}, "unsupported_field", "chat_template"),
        ({"Chat_Template": ENDLESS}, "unknown_field", "Chat_Template"),
        ({"CHAT_TEMPLATE": ENDLESS}, "unknown_field", "CHAT_TEMPLATE"),
        ({"chat_template": {}}, "unsupported_field", "chat_template"),
        ({"chat_template_kwargs": {"chat_template": ENDLESS}}, "unsupported_field", "chat_template_kwargs"),
        ({"chat_template_kwargs": {"Chat_Template": ENDLESS}}, "unsupported_field", "chat_template_kwargs"),
        ({"extra_body": {"chat_template": ENDLESS}}, "unknown_field", "extra_body"),
    ]
    for fields, code, param in places:
        refusal = client.refused_alike("chat", HI | fields)
        assert (refusal.status, refusal.code, refusal.param) == (400, code, param)
        assert "range" not in refusal.message


def test_arguments_cannot_override_what_is_the_servers(client: CaseClient) -> None:
    """The template reads messages and add_generation_prompt, but they are not arguments of a request."""
    for arguments in (
        {"tokenize": True},
        {"messages": []},
        {"messages": "x"},
        {"add_generation_prompt": "x"},
        {"add_generation_prompt": False},
        {"bos_token": "<|im_end|>"},
        {"strftime_now": "x"},
        {"raise_exception": "x"},
        {"range": 1},
        {"self": 1},
        {"__class__": 1},
        {"a\0b": 1},
        {"deep": {"a": 1}},
        {"x" * 5000: 1},
    ):
        refusal = client.refused_alike("chat", HI | {"chat_template_kwargs": arguments})
        assert (refusal.status, refusal.param) == (400, "chat_template_kwargs"), arguments
        assert len(refusal.message) < 300


def test_long_chats_are_refused_while_others_go_on(client: CaseClient) -> None:
    """Too many messages by their number; as many as are taken, by the context, after a rendering off the event loop."""
    answers = []
    other = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    stream = threading.Thread(target=lambda: answers.append(client.native("completion", other)))
    stream.start()
    turn = {"role": "user", "content": "hi there"}
    while stream.is_alive():
        refusal = client.refusal("chat", {"messages": [turn] * 5000})
        assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_value", "messages")
        refusal = client.refusal("chat", {"messages": [turn] * 1024})
        assert (refusal.status, refusal.code, refusal.param) == (400, "context_exceeded", "messages")
        assert client.http.get("/readyz").status_code == 200
        stream.join(0)
    assert answers[0].usage["completion_tokens"] == 24
    assert len(answers[0].pieces) > 3  # heard all along, not in one lump at the end
