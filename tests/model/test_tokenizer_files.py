"""tokenizer.json and its companions: small whole ones, and damaged or hostile ones (case O35)."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.model.errors import ModelFileError
from headrace.model.tokenizer import Tokenizer, load_tokenizer
from headrace.model.vocabulary import MAX_TOKENS, SPACE_MARK, byte_alphabet


def added(index: int, content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False} | flags
    return {"id": index, "content": content, "special": special, **flags}


def byte_level() -> dict[str, Any]:
    vocab = byte_alphabet() | {"ab": 256}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(257, "<|end|>"), added(258, "<think>", special=False)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
    }


def metaspace() -> dict[str, Any]:
    """The shape of Llama 2's file."""
    letters = [SPACE_MARK, *"abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, SPACE_MARK + "a"]
    return {
        "version": "1.0",
        "added_tokens": [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE_MARK},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [f"{SPACE_MARK} a"],
        },
    }


def load(folder: Path, source: object, **companions: object) -> Tokenizer:
    for name, value in {"tokenizer": source, **companions}.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return load_tokenizer(folder)


def test_byte_level(tmp_path: Path) -> None:
    tokenizer = load(
        tmp_path,
        byte_level(),
        tokenizer_config={"eos_token": "<|end|>", "bos_token": None},
        generation_config={"eos_token_id": [257, 65]},
        config={"eos_token_id": 66},
    )
    assert tokenizer.encode("ab <think>é") == [256, 32, 258, 0xC3, 0xA9]
    assert tokenizer.decode([256, 32, 258, 0xC3, 0xA9, 257]) == "ab <think>é"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (None, 257, (65, 66, 257))
    assert tokenizer.special_ids == {257}
    assert not tokenizer.add_bos


def test_sentencepiece_shape(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, metaspace(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.add_bos
    assert [tokenizer.token_bytes[i] for i in tokenizer.encode("a b\né")] == [
        b" a", b" ", b"b", b"\n", b"\xc3", b"\xa9",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("a b\né")) == "a b\né"
    assert 2 not in tokenizer.encode("</s>")
    assert tokenizer.encode("</s>", allow_special=True) == [2]


def test_settings_that_would_change_prompts_are_off(tmp_path: Path) -> None:
    source = byte_level()
    source["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    source["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    source["model"]["dropout"] = 1.0
    assert load(tmp_path, source).encode("abxyz") == [256, *b"xyz"]


def test_no_other_spelling_normalises_into_a_control_token(tmp_path: Path) -> None:
    source = byte_level()
    source["normalizer"] = {"type": "NFKC"}
    source["added_tokens"][0]["normalized"] = True
    tokenizer = load(tmp_path, source)
    assert 257 not in tokenizer.encode("\uff1c|end|\uff1e", allow_special=True)
    assert tokenizer.encode("<|end|>", allow_special=True) == [257]


def test_the_hash_depends_on_what_determines_ids(tmp_path: Path) -> None:
    source = byte_level()
    first = load(tmp_path, source).content_hash
    assert load(tmp_path, json.dumps(source, indent=1)).content_hash == first
    source["model"]["merges"] = []
    assert load(tmp_path, source).content_hash != first


def changed(path: str, value: object) -> dict[str, Any]:
    source: Any = copy.deepcopy(byte_level())
    *parents, last = path.split(".")
    place = source
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    place[int(last) if isinstance(place, list) else last] = value
    whole: dict[str, Any] = source
    return whole


SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
DAMAGED: list[tuple[object, str]] = [
    ("", "not JSON"),
    ("{", "not JSON"),
    ("[]", "list"),
    ("{}", "'model'"),
    ("[" * 100_000, "nested too deeply"),
    ('{"model": NaN}', "NaN"),
    ("\x80\x02pickle", "not JSON"),
    (changed("model", []), "'model'"),
    (changed("model.type", "WordPiece"), "'WordPiece' is not supported"),
    (changed("model.vocab", {}), "not a usable tokenizer"),
    (changed("model.vocab", [1]), "not a usable tokenizer"),
    (changed("model.vocab.a", -1), "not a usable tokenizer"),
    (changed("model.vocab.a", "x"), "not a usable tokenizer"),
    (changed("model.vocab.a", 5), "share one id"),
    (changed("model.vocab.a", 4_000_000_000), f"limit is {MAX_TOKENS}"),
    (changed("model.merges", [["a", "zz"]]), "out of vocabulary"),
    (changed("model.merges", [["a"]]), "not a usable tokenizer"),
    (changed("model.merges", 3), "not a usable tokenizer"),
    (changed("model.unk_token", "zz"), "unk_token is 'zz'"),
    (changed("model.unk_token", 3), "not a usable tokenizer"),
    (changed("decoder", None), "decoder"),
    (changed("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}), "WordPiece"),
    (changed("decoder.type", "Nonsense"), "not a usable tokenizer"),
    (changed("pre_tokenizer", SPLIT), "not a usable tokenizer"),
    (changed("added_tokens", {}), "'added_tokens'"),
    (changed("added_tokens.0", "x"), "'added_tokens'"),
    (changed("added_tokens.0.id", "x"), "'id' or 'content'"),
    (changed("added_tokens.0.id", 300), "claims id 300"),
    (changed("added_tokens.0.content", None), "'id' or 'content'"),
    (changed("added_tokens.0.special", "yes"), "'special'"),
]


@pytest.mark.parametrize(("source", "reason"), DAMAGED, ids=[str(i) for i in range(len(DAMAGED))])
def test_a_damaged_file_is_named_with_its_reason(tmp_path: Path, source: object, reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, source)
    assert caught.value.path == str(tmp_path / "tokenizer.json")
    assert reason in caught.value.reason


COMPANIONS: list[tuple[str, object, str]] = [
    ("tokenizer_config", "{", "not JSON"),
    ("tokenizer_config", {"bos_token": "<s>"}, "bos_token is '<s>'"),
    ("tokenizer_config", {"eos_token": {"content": 3}}, "eos_token is 3"),
    ("generation_config", {"eos_token_id": 259}, "259"),
    ("generation_config", {"eos_token_id": ["x"]}, "'x'"),
    ("config", {"eos_token_id": -1}, "-1"),
    ("config", "not json", "not JSON"),
]


@pytest.mark.parametrize(("name", "value", "reason"), COMPANIONS)
def test_a_damaged_companion_is_named(tmp_path: Path, name: str, value: object, reason: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        load(tmp_path, byte_level(), **{name: value})
    assert caught.value.path == str(tmp_path / f"{name}.json")
    assert reason in caught.value.reason


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model alone is not supported"):
        load_tokenizer(tmp_path)


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret.json").write_text(json.dumps(byte_level()))
    (inside / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelFileError, match="leads out of the model directory"):
        load_tokenizer(inside)
