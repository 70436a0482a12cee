"""O16: one owner of special tokens: exact prompt ids over every door, no second BOS, and prefills that stay open."""

import json
from pathlib import Path

import pytest

from tests.cases.case_client import CaseClient, Json

pytestmark = pytest.mark.usefixtures("checks")

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_tokenizer.json"
HI = {"role": "user", "content": "hi"}
SYSTEM_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
SYSTEM_IDS += [8182, 2, 198]
HI_IDS = [*SYSTEM_IDS, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
CONTINUE = {"continue_final_message": True, "max_tokens": 4, "temperature": 0}


def test_a_chat_has_these_ids_everywhere(client: CaseClient) -> None:
    body = {"messages": [HI], "max_tokens": 1, "temperature": 0}
    for answer in client.everywhere("chat", body):
        assert answer.prompt_ids == HI_IDS
        assert answer.usage["prompt_tokens"] == 31
    assert client.http.post("/tokenize", json={"messages": [HI]}).json()["tokens"] == HI_IDS


def test_the_same_prompt_as_text_and_as_ids(client: CaseClient) -> None:
    """Whoever renders by hand gets the same ids, and so the same answer."""
    text = client.http.post("/detokenize", json={"tokens": HI_IDS}).json()["prompt"]
    limits: Json = {"max_tokens": 6, "temperature": 0}
    chat = client.whole("chat", {"messages": [HI], "return_token_ids": True} | limits)
    for prompt in (text, HI_IDS):
        (answer, *_) = client.everywhere("completion", {"prompt": prompt} | limits)
        assert answer.prompt_ids == HI_IDS
        assert answer.token_ids == chat.token_ids


def test_conversations_have_the_references_ids(client: CaseClient) -> None:
    for chat in json.loads(GOLDEN.read_text())["chats"]:
        fields = {name: value for name, value in chat.items() if name != "ids"}
        assert client.http.post("/tokenize", json=fields).json()["tokens"] == chat["ids"], fields


def test_a_prefill_stays_open_to_its_last_space(client: CaseClient) -> None:
    """Not closed by an end id, not trimmed, and the output goes on from there."""
    for content in ("The answer is", "The answer is ", "The answer is  \n", ""):
        body = {"messages": [HI, {"role": "assistant", "content": content}]} | CONTINUE
        tail = client.http.post("/tokenize", json={"prompt": content}).json()["tokens"]
        for answer in client.everywhere("chat", body):
            assert answer.prompt_ids == HI_IDS + tail
            assert answer.token_ids
            assert not answer.text.startswith(content or "assistant")


def test_a_closed_assistant_turn_is_another_prompt(client: CaseClient) -> None:
    messages = [HI, {"role": "assistant", "content": "Hello."}]
    ids = client.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    open_ids = client.http.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()[
        "tokens"
    ]
    assert ids == [*open_ids, 2, 198, 1, 520, 9531, 198]
    bare = {"messages": messages, "add_generation_prompt": False}
    assert client.http.post("/tokenize", json=bare).json()["tokens"] == [*open_ids, 2, 198]


def test_contradictory_flags_are_refused(client: CaseClient) -> None:
    prefill = {"messages": [HI, {"role": "assistant", "content": "The"}]} | CONTINUE
    for body in (prefill | {"add_generation_prompt": True}, {"messages": [HI]} | CONTINUE):
        refusal = client.refused_alike("chat", body)
        assert (refusal.status, refusal.code) == (400, "conflicting_fields")
        assert refusal.param == "continue_final_message"


def test_an_own_system_turn_replaces_the_default_one(client: CaseClient) -> None:
    own = [{"role": "system", "content": "Be brief."}, HI]
    for answer in client.everywhere("chat", {"messages": own, "max_tokens": 1, "temperature": 0}):
        assert answer.prompt_ids[:3] == [1, 9690, 198]
        assert answer.prompt_ids[-len(HI_IDS) + len(SYSTEM_IDS) :] == HI_IDS[len(SYSTEM_IDS) :]
        assert answer.prompt_ids.count(1) == 3
        assert answer.prompt_ids[: len(SYSTEM_IDS)] != SYSTEM_IDS
