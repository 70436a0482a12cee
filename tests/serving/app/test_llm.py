"""LLM on the default model: what ``headrace generate`` runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import LLM
from headrace.serving.app.offline import RequestError
from headrace.serving.core.request import FinishReason

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = (504, 3575, 282, 4649, 314, 7042, 30, 2)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    yield LLM(str(smollm2_path), num_slots=4, context=512, chunk_tokens=64)


def test_the_capital_of_france(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, temperature=0.0)
    assert answer.token_ids == ANSWER
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason == 2
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.metrics.first_token_ms is not None


def test_text_and_its_ids_are_one_prompt(llm: LLM) -> None:
    text = "The sun rises in the"
    by_text, by_ids = (
        llm.generate(prompt, max_tokens=5, temperature=0.0)[0] for prompt in (text, [llm.tokenizer.encode(text)])
    )
    assert by_text.text == by_ids.text
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.finish_reason is FinishReason.LENGTH


def test_a_batch_gives_what_each_prompt_gives_alone(llm: LLM) -> None:
    prompts = ["Once upon a time", "2 + 2 =", "The largest planet is", "Water boils at", "Paris is", "A cat"]
    batch = llm.generate(prompts, max_tokens=12, temperature=0.0)
    alone = [llm.generate(prompt, max_tokens=12, temperature=0.0)[0] for prompt in prompts]
    assert [c.token_ids for c in batch] == [c.token_ids for c in alone]
    sampled = llm.generate(prompts, max_tokens=8, temperature=1.0, seed=7)
    again = llm.generate(prompts[::-1], max_tokens=8, temperature=1.0, seed=7)
    assert [c.token_ids for c in sampled] == [c.token_ids for c in again[::-1]]


def test_several_conversations(llm: LLM) -> None:
    answers = llm.chat([QUESTION, QUESTION], max_tokens=3, temperature=0.0)
    assert [a.token_ids for a in answers] == [ANSWER[:3], ANSWER[:3]]
    assert answers[1].finish_reason is FinishReason.LENGTH


def test_stop_strings_end_text_and_tokens(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, temperature=0.0, stop=["France"])
    assert answer.text == "The capital of "
    assert answer.token_ids == ANSWER[:4]
    assert answer.stop_reason == "France"


def test_logprobs_of_every_token(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, temperature=0.0, num_logprobs=3)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(ANSWER)
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.rank == 1
        assert entry.top[0] == (token_id, entry.chosen)
        assert len(entry.top) == 3


def test_scores_are_the_logprobs_of_free_running_generation(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, temperature=0.0, num_logprobs=0)
    assert answer.logprobs is not None
    scores = llm.score(answer.prompt_token_ids, answer.token_ids)
    assert [s.chosen for s in scores] == pytest.approx([entry.chosen for entry in answer.logprobs], abs=2e-3)
    assert [s.rank for s in scores] == [1] * len(ANSWER)
    (unlikely,) = llm.score(answer.prompt_token_ids, [1000])
    assert unlikely.rank > 1
    assert unlikely.chosen < scores[0].chosen


def test_nothing_compiles_after_warm_up(llm: LLM) -> None:
    llm.generate(["a", "b"], max_tokens=3, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
    assert llm.stats().compiles_after_ready == 0


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused_by_name(llm: LLM, params: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate("x", **params)  # type: ignore[arg-type]


def test_unknown_parameters_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("x", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="prompt 1: .*context"):
        llm.generate([[1], [1] * 600])
