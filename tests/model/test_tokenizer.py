"""The tokenizer against transformers' ids, from a GGUF file and from tokenizer.json (cases O01, O12, O13, O38)."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.model.errors import ModelFileError
from headrace.model.tokenizer import TokenizationError, Tokenizer, load_tokenizer
from headrace.serving.core.text import Detokenizer
from tests.golden.random_text import ids_digest, random_strings

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_tokenizer.json"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(GOLDEN.read_text())
    return record


@pytest.fixture(scope="module")
def from_gguf(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def from_json(from_gguf: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same vocabulary, written the way Hugging Face directories hold it."""
    folder = tmp_path_factory.mktemp("smollm2")
    source = json.loads(from_gguf._vocabulary.backend.to_str()) | {"decoder": {"type": "ByteLevel"} | BYTE_LEVEL}
    (folder / "tokenizer.json").write_text(json.dumps(source))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return load_tokenizer(folder, model_vocab_size=49152)


BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.fixture(scope="module", params=["gguf", "json"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    loaded: Tokenizer = request.getfixturevalue(f"from_{request.param}")
    return loaded


def test_ids_of_texts_are_the_references(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    different = [text for text, ids in golden["texts"] if tokenizer.encode(text, allow_special=True) != ids]
    assert len(golden["texts"]) > 300
    assert not different


def test_ids_of_ten_thousand_random_strings_are_the_references(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    rows = [tokenizer.encode(text, allow_special=True) for text in random_strings()]
    assert sum(map(len, rows)) == golden["random"]["num_ids"]
    assert ids_digest(rows) == golden["random"]["sha256"]


def test_texts_of_ids_are_the_references(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    assert [[ids, tokenizer.decode(ids)] for ids, _ in golden["decoded"]] == golden["decoded"]


def test_the_byte_table_agrees_with_the_library_on_random_ids(from_json: Tokenizer) -> None:
    rng = random.Random(5)
    backend = from_json._vocabulary.backend
    for _ in range(2000):
        ids = [rng.randrange(from_json.vocab_size) for _ in range(rng.randrange(12))]
        assert from_json.decode(ids) == backend.decode(ids, skip_special_tokens=True)
        assert from_json.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)


def test_known_ids_and_facts(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == set(range(17))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, 2, (0, 2), False)
    assert tokenizer.encode("😀") == [10813, 242, 218]
    assert tokenizer.encode("龘") == [180, 139, 242]
    assert tokenizer.encode(" 42") == [216, 36, 34]
    assert tokenizer.encode("DEFGHIJ") == [33203, 23960, 57, 58]
    assert tokenizer.token_bytes[24211] == "\ufffd".encode()
    whole = [i for i, data in enumerate(tokenizer.token_bytes) if "\ufffd" not in data.decode("utf-8", "replace")]
    assert tokenizer.vocab_size - len(whole) == 313 + 1  # One more for the token that is U+FFFD itself.
    assert len({bytes((byte,)) for byte in range(256)} - set(tokenizer.token_bytes)) == 21


def test_what_the_vocabulary_cannot_express_is_dropped_and_never_becomes_a_control_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\u0004b") == [81, 82]
    assert tokenizer.encode("\u0004") == []
    assert tokenizer.encode("\U00040000") == [218, 218, 218]
    for text in random_strings(500, seed=11):
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))


def test_control_text_is_a_control_id_only_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    for index in tokenizer.special_ids:
        text = tokenizer.token_text(index)
        assert tokenizer.encode(text, allow_special=True) == [index] == [tokenizer.special_id(text)]
        for surrounded in (text, f"a{text}b", f" {text}\n{text}"):
            ids = tokenizer.encode(surrounded)
            assert tokenizer.special_ids.isdisjoint(ids)
            assert tokenizer.decode(ids) == surrounded


@pytest.mark.parametrize("text", ["emoji \ud83d", "\udcf0", "a" * 1000 + "\udfff", "\ude00\ud83d"])
@pytest.mark.parametrize("allow_special", [False, True])
def test_half_of_a_surrogate_pair_is_a_typed_error(tokenizer: Tokenizer, text: str, allow_special: bool) -> None:
    place = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
    with pytest.raises(TokenizationError, match=f"character {place};"):
        tokenizer.encode(text, allow_special=allow_special)


@pytest.mark.parametrize("text", ["😀", "龘", "👨\u200d👩\u200d👧\u200d👦", "สวัสดี", " 42", "  x  ", "\ufffd!"])
def test_one_id_at_a_time_gives_the_text_of_all(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer.token_bytes, tokenizer.special_ids)
    deltas = [detokenizer.push([i]) for i in tokenizer.encode(text)]
    assert "".join(deltas) == text
    assert detokenizer.flush() == ""
    assert all("\ufffd" not in delta or "\ufffd" in text for delta in deltas)


def test_threads_share_a_tokenizer(from_gguf: Tokenizer) -> None:
    texts = list(random_strings(200, seed=17))
    expected = [(from_gguf.encode(t), from_gguf.encode(t, allow_special=True)) for t in texts]

    def work(seed: int) -> int:
        rng = random.Random(seed)
        for _ in range(500):
            index = rng.randrange(len(texts))
            special = rng.random() < 0.5
            ids = from_gguf.encode(texts[index], allow_special=special)
            assert ids == expected[index][special]
            from_gguf.decode(ids)
        return 500

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(work, range(16))) == 8000


def test_the_hash_is_of_the_content(from_gguf: Tokenizer, from_json: Tokenizer, smollm2_path: Path) -> None:
    assert load_tokenizer(smollm2_path).content_hash == from_gguf.content_hash != from_json.content_hash
    assert len(bytes.fromhex(from_gguf.content_hash)) == 32


@pytest.mark.parametrize("model_vocab_size", [49151, 32000, 60000])
def test_a_tokenizer_of_another_model_is_refused(smollm2_path: Path, model_vocab_size: int) -> None:
    with pytest.raises(ModelFileError, match=f"49152 tokens, the model {model_vocab_size}"):
        load_tokenizer(smollm2_path, model_vocab_size=model_vocab_size)
    assert load_tokenizer(smollm2_path, model_vocab_size=49152 + 64).vocab_size == 49152
