"""O10: candidates in order, each by id, bytes and text; the chosen token once, with its true rank; the model's own
values whatever the temperature."""

import numpy as np
import pytest

from headrace.model.tokenizer import Tokenizer
from tests.cases.case_client import Answer, CaseClient, Json, at_once
from tests.cases.conftest import Reference

pytestmark = pytest.mark.usefixtures("checks")

TOLERANCE = 3e-3
"""With int16 activations, the default on a CPU, logprobs are off by up to 2e-3 (make check-activations)."""
EMOJI = {"prompt": "😀 😀 😀", "max_tokens": 6, "logprobs": 20, "return_token_ids": True}
END = 2


def log_softmax(rows_SV: np.ndarray) -> np.ndarray:
    top_S1 = rows_SV.max(axis=-1, keepdims=True)
    return rows_SV - top_S1 - np.log(np.exp(rows_SV - top_S1).sum(axis=-1, keepdims=True))


def test_values_order_and_ranks_are_the_references(
    client: CaseClient, tokenizer: Tokenizer, reference: Reference
) -> None:
    bodies = [EMOJI | {"temperature": temperature, "seed": 3} for temperature in (0, 0.5, 1.5, 2.0)]
    for answer in at_once(lambda body: client.native("completion", body), bodies):
        is_the_references(answer, tokenizer, reference)


def is_the_references(answer: Answer, tokenizer: Tokenizer, reference: Reference) -> None:
    rows = log_softmax(reference([*answer.prompt_ids, *answer.token_ids[:-1]]))[len(answer.prompt_ids) - 1 :]
    assert len(answer.logprobs) == 6
    for row_V, token_id, entry in zip(rows, answer.token_ids, answer.logprobs, strict=True):
        tops = entry["top_logprobs"]
        assert entry["token_id"] == token_id
        assert entry["logprob"] == pytest.approx(row_V[token_id], abs=TOLERANCE)
        better = np.sum(row_V > row_V[token_id] + TOLERANCE) + 1
        not_worse = np.sum(row_V >= row_V[token_id] - TOLERANCE)
        assert better <= entry["rank"] <= not_worse
        assert len({top["token_id"] for top in tops}) == 20
        assert sorted(tops, key=lambda top: (-top["logprob"], top["token_id"])) == tops
        for top in tops:
            assert top["logprob"] == pytest.approx(row_V[top["token_id"]], abs=TOLERANCE)
            names_its_token(top, tokenizer)
        assert tops[0]["logprob"] == pytest.approx(row_V.max(), abs=TOLERANCE)
        chosen = [place for place, top in enumerate(tops, 1) if top["token_id"] == token_id]
        assert chosen == ([entry["rank"]] if entry["rank"] <= 20 else [])
        names_its_token(entry, tokenizer)


def names_its_token(entry: Json, tokenizer: Tokenizer) -> None:
    """By bytes, and by a text that differs even where the bytes are no character."""
    data = tokenizer.token_bytes[entry["token_id"]]
    assert bytes(entry["bytes"]) == data
    try:
        assert entry["token"] == data.decode()
    except UnicodeDecodeError:
        assert entry["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_the_same_prefix_gives_the_same_values_at_any_temperature(client: CaseClient) -> None:
    """Two ids are forced, so that only the temperature differs."""
    forced = {"allowed_token_ids": [10813], "max_tokens": 2}
    seen = [
        client.native("completion", EMOJI | forced | {"temperature": temperature, "seed": 3}).logprobs
        for temperature in (0, 0.5, 2.0)
    ]
    for entries in seen[1:]:
        for entry, first in zip(entries, seen[0], strict=True):
            assert [top["token_id"] for top in entry["top_logprobs"]] == [
                top["token_id"] for top in first["top_logprobs"]
            ]
            assert entry["logprob"] == pytest.approx(first["logprob"], abs=1e-4)


def test_control_tokens_can_be_candidates(client: CaseClient) -> None:
    """After a complete answer the end of the turn is the most likely token, and is named like any other."""
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
    ]
    body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 2}
    for answer in client.everywhere("chat", body | {"logprobs": True, "top_logprobs": 20}):
        assert answer.token_ids == [END]
        (entry,) = answer.logprobs
        assert (entry["token"], entry["token_id"], entry["rank"]) == ("<|im_end|>", END, 1)
        assert entry["top_logprobs"][0]["token"] == "<|im_end|>"


def test_the_completions_shape_keeps_candidates_apart_that_print_alike(
    client: CaseClient, tokenizer: Tokenizer
) -> None:
    """Its candidates are a map by text: 20 ids need 20 texts, and the chosen token is in it in any case."""
    answer = client.whole("completion", EMOJI | {"temperature": 1.5, "seed": 3})
    native = client.native("completion", EMOJI | {"temperature": 1.5, "seed": 3})
    (legacy,) = answer.logprobs
    assert answer.token_ids == native.token_ids
    assert legacy["tokens"] == [entry["token"] for entry in native.logprobs]
    for texts, entry in zip(legacy["top_logprobs"], native.logprobs, strict=True):
        expected = {top["token"] for top in entry["top_logprobs"]} | {entry["token"]}
        assert set(texts) == expected
        assert len(texts) in (20, 21)
