"""O13: bytes that the vocabulary lacks are lost as documented; they never become another token or a crash."""

import json
from pathlib import Path

import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import CaseClient, Json

pytestmark = pytest.mark.usefixtures("checks")

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_tokenizer.json"


def tokenize(client: CaseClient, body: Json) -> list[int]:
    answer = client.http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    assert value["count"] == len(value["tokens"])
    ids: list[int] = value["tokens"]
    return ids


def test_the_ids_that_there_are_count(client: CaseClient) -> None:
    """/tokenize shows, and usage counts, what is left."""
    for text, ids in (("a\x04b", [81, 82]), ("\U00040000", [218, 218, 218])):
        assert tokenize(client, {"prompt": text}) == ids
        for answer in client.everywhere("completion", {"prompt": text, "max_tokens": 1, "temperature": 0}):
            assert answer.prompt_ids == ids
            assert answer.usage["prompt_tokens"] == len(ids)


def test_a_text_without_any_id_is_refused(client: CaseClient) -> None:
    for prompt in ("\x04", "\x04" * 300, "", [], ["a", "\x04"]):
        refusal = client.refused_alike("completion", {"prompt": prompt, "max_tokens": 1})
        assert (refusal.status, refusal.code) == (400, "empty_prompt")
        assert refusal.param == ("prompt[1]" if prompt == ["a", "\x04"] else "prompt")
    assert tokenize(client, {"prompt": "\x04"}) == []


def test_no_byte_becomes_a_control_token(client: CaseClient, tokenizer: Tokenizer) -> None:
    """Every single byte's character, planes 1 to 16, and what is between words, in a chat and alone."""
    texts = [chr(code) for code in range(256)] + [chr(plane << 16 | 0x800) for plane in range(1, 17)]
    joined = " ".join(texts)
    assert not set(tokenize(client, {"prompt": joined})) & tokenizer.special_ids
    chat = tokenize(client, {"messages": [{"role": "user", "content": joined}]})
    empty = tokenize(client, {"messages": [{"role": "user", "content": "x"}]})
    assert [i for i in chat if i in tokenizer.special_ids] == [i for i in empty if i in tokenizer.special_ids]


def test_the_server_has_the_references_ids(client: CaseClient) -> None:
    texts = json.loads(GOLDEN.read_text())["texts"]
    different = [text for text, ids in texts if tokenize(client, {"prompt": text}) != ids]
    assert len(texts) > 300
    assert not different
