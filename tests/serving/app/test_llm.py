"""LLM on the default model: what ``headrace generate`` runs. Few tokens each: a step takes long on a busy machine."""

from pathlib import Path

import pytest

from headrace import LLM
from headrace.serving.app.offline import Completion, RequestError
from headrace.serving.core.request import FinishReason

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = (504, 3575, 282, 4649, 314, 7042, 30, 2)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> LLM:
    return LLM(str(smollm2_path), num_slots=4, context=512, chunk_tokens=64)


@pytest.fixture(scope="module")
def answer(llm: LLM) -> Completion:
    [completion] = llm.chat(QUESTION, temperature=0.0, num_logprobs=3)
    return completion


def test_the_capital_of_france(answer: Completion) -> None:
    assert answer.token_ids == ANSWER
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason is FinishReason.STOP
    assert answer.stop_reason == 2
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.metrics.first_token_ms is not None


def test_logprobs_of_every_token(answer: Completion) -> None:
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(ANSWER)
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.rank == 1
        assert entry.top[0] == (token_id, entry.chosen)
        assert len(entry.top) == 3


def test_scores_are_the_logprobs_of_free_running_generation(llm: LLM, answer: Completion) -> None:
    assert answer.logprobs is not None
    scores = llm.score(answer.prompt_token_ids, answer.token_ids[:4])
    assert [s.chosen for s in scores] == pytest.approx([entry.chosen for entry in answer.logprobs[:4]], abs=2e-3)
    assert [s.rank for s in scores] == [1] * 4
    [unlikely] = llm.score(answer.prompt_token_ids, [1000])
    assert unlikely.rank > 1
    assert unlikely.chosen < scores[0].chosen


def test_text_and_its_ids_are_one_prompt_and_mates_change_nothing(llm: LLM) -> None:
    text, other = "The sun rises in the", "2 + 2 ="
    [alone] = llm.generate(text, max_tokens=4, temperature=0.0)
    [_, in_batch] = llm.generate([other, text], max_tokens=4, temperature=0.0)
    [by_ids] = llm.generate([llm.tokenizer.encode(text)], max_tokens=4, temperature=0.0)
    assert alone.token_ids == in_batch.token_ids == by_ids.token_ids
    assert alone.text == by_ids.text
    assert alone.finish_reason is FinishReason.LENGTH


def test_a_seed_repeats_and_the_place_in_a_batch_does_not_matter(llm: LLM) -> None:
    prompts = ["Once upon a time", "A cat"]
    first = llm.generate(prompts, max_tokens=4, temperature=1.0, seed=7)
    again = llm.generate(prompts[::-1], max_tokens=4, temperature=1.0, seed=7)
    assert [c.token_ids for c in first] == [c.token_ids for c in again[::-1]]


def test_several_conversations_end_at_a_stop_string(llm: LLM) -> None:
    completions = llm.chat([QUESTION, QUESTION], temperature=0.0, stop=["France"])
    for completion in completions:
        assert completion.text == "The capital of "
        assert completion.token_ids == ANSWER[:4]
        assert completion.stop_reason == "France"


def test_nothing_compiles_after_warm_up(llm: LLM) -> None:
    llm.generate(["a", "b"], max_tokens=2, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)
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


def test_unknown_parameters_and_long_prompts_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("x", temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="prompt 1: .*context"):
        llm.generate([[1], [1] * 600])
