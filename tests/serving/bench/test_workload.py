"""Prompts come from fields alone, and the hash knows every field."""

from dataclasses import fields, replace

import pytest

from headrace.serving.bench.workload import FIRST_ID, LAST_ID, WORDS, Workload
from headrace.serving.core.errors import ConfigError

WORK = Workload(streams=2, requests=8, max_tokens=4, prompt_words=16, seed=3)


def test_prompts_are_the_same_each_time_and_all_different() -> None:
    prompts = [WORK.prompt(index) for index in range(-2, 8)]
    assert prompts == [replace(WORK, streams=5).prompt(index) for index in range(-2, 8)]
    assert len(set(prompts)) == 10
    assert all(len(prompt.split()) == 16 and set(prompt.split()) <= set(WORDS) for prompt in prompts)
    # Written down: another way to draw needs another name in PROMPTS.
    assert Workload(streams=1, requests=1, max_tokens=1, prompt_words=4).prompt(0) == "the bridge wheel flour"


def test_a_prompt_of_ids_has_exactly_as_many() -> None:
    ids = replace(WORK, prompt_words=0, prompt_tokens=50).prompt(1)
    assert len(ids) == 50 and all(FIRST_ID <= token < LAST_ID for token in ids)


def test_the_hash_changes_with_every_field() -> None:
    others = {
        "streams": 3, "requests": 9, "max_tokens": 5, "prompt_words": 17, "warmup": 1, "temperature": 0.5,
        "ignore_eos": False, "seed": 4,
    }  # fmt: skip
    hashes = [replace(WORK, **{name: value}).hash for name, value in others.items()]
    hashes.append(replace(WORK, prompt_words=0, prompt_tokens=16).hash)
    assert set(others) | {"prompt_tokens"} == {field.name for field in fields(Workload)}
    assert len({WORK.hash, *hashes}) == 10


def test_drawn_answers_have_a_seed_and_greedy_ones_none() -> None:
    assert "seed" not in WORK.body(0)
    drawn = replace(WORK, temperature=1.0)
    assert drawn.body(0)["seed"] != drawn.body(1)["seed"]
    assert "ignore_eos" not in replace(WORK, ignore_eos=False).body(0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"streams": 0}, "--streams is 0; it must be from 1 to 4,096"),
        ({"requests": 1_000_001}, "--requests is 1000001"),
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"prompt_words": -1}, "--prompt-words is -1; it must be from 0"),
        ({"prompt_words": 0}, "give either --prompt-words or --prompt-tokens"),
        ({"prompt_tokens": 5}, "give either --prompt-words or --prompt-tokens"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"requests": 1_000_000, "max_tokens": 21}, "21,000,000 tokens; 20,000,000 are the most"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_option(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(WORK, **changes)
