"""Vocabularies of GGUF files: small ones of both kinds, against the libraries that define them, and damaged ones."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from headrace.model.errors import ModelFileError
from headrace.model.gguf_metadata import GGUFFile
from headrace.model.tokenizer import Tokenizer, load_tokenizer
from headrace.model.vocabulary import byte_alphabet

PATH = Path("vocabulary.gguf")
ALPHABET = {byte: char for char, byte in byte_alphabet().items()}


def spelled(text: str) -> str:
    return "".join(ALPHABET[byte] for byte in text.encode())


def gguf(fields: dict[str, Any]) -> GGUFFile:
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return GGUFFile(path=PATH, version=3, fields=named, tensors={}, data_offset=0, file_bytes=0)


def byte_level(**changes: Any) -> dict[str, Any]:
    """All bytes, a few merges, two control tokens and one of the user's."""
    tokens = ["<|end|>", "<|start|>", *map(ALPHABET.__getitem__, range(256)), "<think>"]
    merges = [spelled(pair[0]) + " " + spelled(pair[1]) for pair in (("a", "b"), (" ", "a"), ("1", "2"), ("\n", "\n"))]
    tokens += [spelled(text) for text in ("ab", " a", "12", "\n\n")]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * 256 + [4] + [1] * 4,
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return fields | changes


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab 12", ["ab", " ", "12"]),
        ("smollm", "ab 12", ["ab", " ", "1", "2"]),
        ("qwen2", "ab 12", ["ab", " ", "1", "2"]),
        ("llama-bpe", "ab 12", ["ab", " ", "12"]),
        ("gpt-2", "a\n\n12", ["a", "\n", "\n", "12"]),
        ("smollm", "a\n\n12", ["a", "\n\n", "1", "2"]),
        ("llama-bpe", "a\n\n12", ["a", "\n\n", "12"]),
        ("gpt-2", "<think> a", ["<think>", " a"]),
    ],
)
def test_the_pre_tokenizer_decides_where_tokens_end(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(load_tokenizer(gguf(byte_level(pre=pre))), text) == expected


def test_composed_characters_stay_apart_except_where_the_family_composes_them() -> None:
    assert (
        load_tokenizer(gguf(byte_level(pre="smollm"))).decode([*load_tokenizer(gguf(byte_level())).encode("e\u0301")])
        == "e\u0301"
    )
    qwen = load_tokenizer(gguf(byte_level(pre="qwen2")))
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"


@pytest.mark.parametrize(
    ("fields", "add_bos"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_whether_bos_goes_first(fields: dict[str, Any], add_bos: bool) -> None:
    assert load_tokenizer(gguf(byte_level(**fields))).add_bos is add_bos


def test_end_ids_are_the_declared_ones_and_control_tokens_with_known_names() -> None:
    tokenizer = load_tokenizer(gguf(byte_level(eos_token_id=5, eot_token_id=9)))
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (5, (0, 5, 9))


def test_a_control_token_that_merges_could_build_is_still_not_built() -> None:
    fields = byte_level()
    fields["token_type"][fields["tokens"].index("ab")] = 3
    tokenizer = load_tokenizer(gguf(fields))
    control = fields["tokens"].index("ab")
    assert tokenizer.encode("xaby", allow_special=True)[1] == control
    assert control not in tokenizer.encode("xaby ab abab")
    assert tokenizer.decode(tokenizer.encode("xaby ab abab")) == "xaby ab abab"


SENTENCES = [
    "The mill by the river turns day and night.", "Water is led to the wheel by a head race.",
    "hello world, hello mill", "Çа ира и вода", "a b  c   d", "the theatre, the other, then", "river rivers riverbed",
]  # fmt: skip


@pytest.fixture(scope="module")
def processor() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_fields(processor: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    def kind(i: int) -> int:
        return 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    indices = range(processor.get_piece_size())
    fields: dict[str, Any] = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in indices],
        "scores": [processor.get_score(i) for i in indices],
        "token_type": [kind(i) for i in indices],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    }
    return fields | changes


def test_sentencepiece_vocabularies_agree_with_the_library(processor: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = load_tokenizer(gguf(sentencepiece_fields(processor)))
    rng = random.Random(3)
    words = " ".join(SENTENCES).split() + ["😀", "龘", "  ", "\n", "<0x41>x", "x" * 9, "4 2"]
    for _ in range(300):
        text = " ".join(rng.choice(words) for _ in range(1 + rng.randrange(8)))
        ids = tokenizer.encode(text)
        assert ids == processor.encode(text), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.add_bos
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("</s>hello", allow_special=True)[0] == processor.eos_id()
    assert processor.eos_id() not in tokenizer.encode("</s>hello")


def test_a_space_prefix_only_where_the_vocabulary_has_one(processor: sentencepiece.SentencePieceProcessor) -> None:
    bare = load_tokenizer(gguf(sentencepiece_fields(processor, add_space_prefix=False)))
    assert bare.decode(bare.encode("mill")) == "mill"
    assert bare.decode(bare.encode(" mill")) == " mill"
    assert bare.encode(" mill") == processor.encode("mill")


TOKENS = byte_level()["tokens"]
DAMAGED = [
    ({"model": None}, "tokenizer.ggml.model is missing"),
    ({"model": 7}, "tokenizer.ggml.model is int"),
    ({"model": "bert"}, "'bert' is not supported"),
    ({"pre": None}, "tokenizer.ggml.pre is missing"),
    ({"pre": "viking-9"}, "'viking-9'"),
    ({"pre": ["gpt-2"]}, "tokenizer.ggml.pre is list"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": []}, "empty"),
    ({"tokens": "abc"}, "tokenizer.ggml.tokens is str"),
    ({"tokens": [1, 2, 3]}, "must hold str"),
    ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, f"tokens 5 and {len(TOKENS) - 1} are both"),
    ({"tokens": TOKENS[:-1]}, "tokenizer.ggml.token_type has"),
    ({"token_type": [1]}, "has 1 elements"),
    ({"token_type": [7] * len(TOKENS)}, "unknown value 7"),
    ({"token_type": ["a"] * len(TOKENS)}, "must hold int"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": ["a"]}, "merge 0 is 'a'"),
    ({"merges": ["a b", " b"]}, "merge 1 is ' b'"),
    ({"merges": ["a zz"]}, "'zz', which is no token"),
    ({"merges": ["a c"]}, "'ac', which is no token"),
    ({"merges": [1]}, "must hold str"),
    ({"bos_token_id": len(TOKENS)}, f"bos_token_id is {len(TOKENS)}; ids are 0 to {len(TOKENS) - 1}"),
    ({"eos_token_id": -1}, "eos_token_id is -1"),
    ({"eos_token_id": 1.0}, "eos_token_id is float"),
    ({"eot_token_id": 1 << 40}, "eot_token_id"),
    ({"add_bos_token": 1}, "add_bos_token is int"),
    ({"model": "llama", "merges": None}, "one is needed"),
    ({"model": "llama", "merges": None, "scores": [0.0]}, "has 1 elements"),
    ({"model": "llama", "merges": None, "scores": [float("nan")] * len(TOKENS)}, "not finite"),
    ({"model": "llama", "add_space_prefix": "yes"}, "add_space_prefix is str"),
    ({"model": "llama", "unknown_token_id": 1 << 20}, "unknown_token_id"),
]


@pytest.mark.parametrize(("changes", "reason"), DAMAGED, ids=[reason for _, reason in DAMAGED])
def test_a_damaged_vocabulary_names_file_and_field(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_tokenizer(gguf(byte_level(**changes)))
    assert caught.value.path == str(PATH)
    assert reason in caught.value.reason


def test_random_damage_ends_in_a_tokenizer_or_a_typed_error() -> None:
    rng = random.Random(1)
    junk = [
        None,
        0,
        -1,
        1 << 62,
        "",
        "a b",
        "\x00",
        0.5,
        float("nan"),
        True,
        [],
        [""],
        ["a"] * 300,
        [1] * 261,
        [0.0] * 261,
    ]
    outcomes = {True: 0, False: 0}
    for _ in range(400):
        fields = byte_level(model=rng.choice(("gpt2", "llama")), scores=[0.0] * len(TOKENS))
        for _ in range(rng.randrange(1, 3)):
            name = rng.choice(list(fields))
            value = fields[name]
            if isinstance(value, list) and value and rng.random() < 0.6:
                value = list(value)
                value[rng.randrange(len(value))] = rng.choice(junk)
                fields[name] = value
            else:
                fields[name] = rng.choice(junk)
        try:
            tokenizer = load_tokenizer(gguf(fields))
            tokenizer.decode(tokenizer.encode("ab <|end|> 😀 12\n\n"))
            outcomes[True] += 1
        except ModelFileError:
            outcomes[False] += 1
    assert outcomes[True] > 10 and outcomes[False] > 10
