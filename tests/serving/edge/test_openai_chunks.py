"""JSON shapes: logprobs that a strict parser and lm-eval can read, chunks that clients time."""

import json
import math

import pytest

from headrace.serving.edge.generation import ChosenLogprob, TopLogprob
from headrace.serving.edge.openai_chunks import LOWEST_LOGPROB, LegacyLogprobs, chat_logprobs, token_text


def entry(logprob: float, *top: tuple[int, bytes, float], token: bytes = b"a", token_id: int = 97) -> ChosenLogprob:
    tops = tuple(TopLogprob(*item) for item in top)
    return ChosenLogprob(token_id=token_id, token_bytes=token, logprob=logprob, rank=1, top=tops)


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_infinities_never_reach_the_json(bad: float) -> None:
    entries = [entry(bad, (97, b"a", bad), (98, b"b", -1.0))]
    for shape in (chat_logprobs(entries), LegacyLogprobs().add(entries)):
        json.loads(json.dumps(shape, allow_nan=False))
    content = chat_logprobs(entries)["content"]
    assert isinstance(content, list)
    assert content[0]["logprob"] == LOWEST_LOGPROB
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["b"]


def test_alternatives_keep_their_order_and_carry_id_bytes_and_text() -> None:
    tops = [(i, bytes([0x80 + i]), -0.5 * i) for i in range(20)]
    content = chat_logprobs([entry(-1.0, *tops)])["content"]
    assert isinstance(content, list)
    found = content[0]["top_logprobs"]
    assert [top["token_id"] for top in found] == list(range(20))
    assert len({top["token"] for top in found}) == 20
    assert found[3] == {"token": "bytes:\\x83", "token_id": 3, "logprob": -1.5, "bytes": [0x83]}


def test_the_chosen_token_is_among_the_legacy_alternatives_with_the_same_number() -> None:
    shape = LegacyLogprobs().add(
        [entry(-0.123456789, (97, b"a", -0.123456789), (98, b"b", -3.0)), entry(-9.0, (98, b"b", -3.0))]
    )
    tops, chosen = shape["top_logprobs"], shape["token_logprobs"]
    assert isinstance(tops, list)
    assert isinstance(chosen, list)
    assert tops[0] == {"a": -0.123456789, "b": -3.0}
    assert json.dumps(max(tops[0].values())) == json.dumps(chosen[0])
    assert tops[1] == {"b": -3.0, "a": -9.0}


def test_two_ids_with_one_text_do_not_overwrite_each_other() -> None:
    shape = LegacyLogprobs().add([entry(-3.0, (1, b"x", -1.0), (2, b"x", -2.0), token=b"x", token_id=3)])
    assert shape["top_logprobs"] == [{"x": -1.0, "token_id:2": -2.0, "token_id:3": -3.0}]


def test_offsets_go_on_over_chunks() -> None:
    offsets = LegacyLogprobs()
    assert offsets.add([entry(-1, token="é".encode()), entry(-1, token=b"bc")])["text_offset"] == [0, 1]
    assert offsets.add([entry(-1, token=b"d")])["text_offset"] == [3]


def test_token_text() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xc3") == "bytes:\\xc3"
    assert token_text(b"") == ""
