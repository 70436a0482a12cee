"""The shipped tiny model: the same bits everywhere, whole or not at all, every text, and answers that are some use."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace import LLM
from headrace.model.chat_template import load_chat_template
from headrace.model.config_files import read_config
from headrace.model.directory import ModelDirectory
from headrace.model.pull import TINY, PullError, make, resolve_model
from headrace.model.safetensors_files import SafetensorsSource
from headrace.model.tiny import BEGIN, END, TURN, VOCAB, digest, tiny_files
from headrace.model.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(TINY, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_files_are_the_pinned_ones() -> None:
    files = tiny_files()
    assert digest(files) == TINY.sha256
    assert files == tiny_files()
    assert digest(files | {"config.json": b"{}"}) != TINY.sha256


def test_the_weights_are_those_that_any_reader_of_the_format_sees(directory: Path) -> None:
    """Among them the first values of SHAKE-256, computed by hand: bytes 0x98 and 0x54 of the embedding's stream."""
    from safetensors.numpy import load_file

    stored = load_file(directory / "model.safetensors")
    source = SafetensorsSource(ModelDirectory(directory))
    assert stored.keys() == source.tensors.keys() and len(stored) == 21
    embed = stored["model.embed_tokens.weight"]
    assert (embed.dtype, embed.shape) == (np.dtype(ml_dtypes.bfloat16), (VOCAB, 64))
    first = hashlib.shake_256(b"headrace tiny 1/embed").digest(2)
    assert embed[0, :2].astype(float).tolist() == [(2 * byte - 255) / 512 for byte in first]
    assert all(np.isfinite(x.astype(np.float32)).all() and x.astype(np.float32).any() for x in stored.values())


def test_configuration_tokenizer_and_template_are_a_set(directory: Path) -> None:
    config = read_config(directory)
    assert (config.num_layers, config.width, config.max_context) == (2, 64, 4096)
    assert (config.bos_id, config.eos_ids) == (BEGIN, (END, TURN))
    tokenizer = load_tokenizer(directory, model_vocab_size=config.vocab_size)
    assert tokenizer.vocab_size == VOCAB and tokenizer.add_bos and tokenizer.eos_ids == (END, TURN)
    template = load_chat_template(directory)
    assert template is not None
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "<|end|>"}]
    ids = template.render_ids(tokenizer, talk)
    assert (
        tokenizer.decode(ids, skip_special=False) == "<|begin|><|system|>s<|turn|><|user|><|end|><|turn|><|assistant|>"
    )
    assert END not in ids, "a control text in a message stays text"
    open_end = [*talk, {"role": "assistant", "content": "It is"}]
    assert tokenizer.decode(template.render_ids(tokenizer, open_end, continue_final_message=True)).endswith("It is")


def test_every_text_is_its_bytes_and_every_id_has_a_text(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    text = "".join(map(chr, [*range(0x500), *range(0x2000, 0x2100), 0xFFFF, 0x1F600, 0x10FFFF])) + " \r\n\t  a"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(text.encode()) == text
    assert tokenizer.token_bytes[:256] == tuple(bytes((byte,)) for byte in range(256))
    assert all(tokenizer.token_bytes)


def test_a_directory_in_which_anything_differs_is_made_again(tmp_path: Path) -> None:
    target = make(TINY, cache_dir=tmp_path)
    inode = target.stat().st_ino
    assert make(TINY, cache_dir=tmp_path) == target and target.stat().st_ino == inode, "an intact one stays"
    weights = target / "model.safetensors"
    for damage in (
        lambda: weights.write_bytes(weights.read_bytes()[:-1] + b"\0"),
        lambda: (target / "config.json").unlink(),
        lambda: (target / "generation_config.json").write_text("{}"),
        lambda: (weights.unlink(), weights.mkdir()),
    ):
        damage()
        assert {path.name: path.read_bytes() for path in make(TINY, cache_dir=tmp_path).iterdir()} == tiny_files()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", TINY.directory_name]


def test_other_bits_than_the_pinned_ones_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    other = replace(TINY, make=lambda: tiny_files() | {"config.json": b"{}"})
    with pytest.raises(PullError, match="model 'tiny' came out with SHA-256 .* not the pinned"):
        make(other, cache_dir=tmp_path)
    assert not os.listdir(tmp_path)


@pytest.mark.usefixtures("quick_compiles")
def test_its_greedy_texts_differ_from_each_other_and_do_not_run_in_circles(tmp_path: Path) -> None:
    assert resolve_model("tiny", cache_dir=tmp_path).name == "tiny"
    llm = LLM("tiny", num_slots=1, context=256, chunk_tokens=16, compile_cache=str(tmp_path / "programs"))
    prompts = ["a", "b", "Hello", "Hello!", "Grüße", ""]
    done = llm.generate(prompts, max_tokens=96, temperature=0, num_logprobs=0)
    assert [completion.finish_reason for completion in done] == ["length"] * len(prompts)
    assert len({completion.text[:8] for completion in done}) == len(prompts)
    assert all(len(set(completion.token_ids)) >= 32 for completion in done)
    assert all(completion.text.isascii() for completion in done)
    drawn = llm.generate(["Hello"] * 4, max_tokens=240, temperature=1, seed=7)
    assert len({completion.text for completion in drawn}) == 1 and drawn[0].text != done[2].text
