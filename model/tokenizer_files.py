"""Vocabulary from ``tokenizer.json`` and its companions in a Hugging Face model directory."""

import hashlib
import json
from typing import Any, NoReturn

from tokenizers import Tokenizer

from headrace.model.directory import ModelDirectory
from headrace.model.errors import ModelFileError
from headrace.model.vocabulary import Vocabulary, byte_level_table, check_size, refuse, sentencepiece_table

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_MODEL_TYPES = ("BPE", "Unigram")


def vocabulary_from_directory(directory: ModelDirectory) -> Vocabulary:
    """Raises: ModelFileError, naming the file and the reason."""
    if not directory.has(TOKENIZER):
        hint = " (a tokenizer.model alone is not supported)" if directory.has("tokenizer.model") else ""
        raise ModelFileError(directory.path / TOKENIZER, f"missing; convert the tokenizer to tokenizer.json{hint}")
    source = _serving_form(directory, directory.read_json(TOKENIZER))
    path = directory.path / TOKENIZER
    backend, plain_backend = (_load_backend(json.dumps(source), directory) for _ in range(2))
    plain_backend.encode_special_tokens = True
    tokens = {index: text for text, index in backend.get_vocab(with_added_tokens=True).items()}
    check_size(path, len(tokens), sum(map(len, tokens.values())))
    if len(tokens) != backend.get_vocab_size(with_added_tokens=True):
        refuse(path, "two tokens share one id")
    check_size(path, max(tokens) + 1, 0)
    added: list[dict[str, Any]] = source["added_tokens"]
    for token in added:
        if token["content"] and backend.token_to_id(token["content"]) != token["id"]:
            refuse(path, f"added token {token['content']!r:.60} claims id {token['id']}, which is not free for it")

    kind = _decoder_kind(directory, source.get("decoder"))
    literal_ids = {token["id"] for token in added if token["content"]}
    table = (byte_level_table if kind == "ByteLevel" else sentencepiece_table)(tokens, literal_ids)
    config = directory.read_json(CONFIG) if directory.has(CONFIG) else {}
    bos_id = _named_token(directory, backend, config, "bos_token")
    return Vocabulary(
        path=path,
        backend=backend,
        plain_backend=plain_backend,
        token_bytes=table,
        special_ids=frozenset(token["id"] for token in added if token["special"] and token["content"]),
        bos_id=bos_id,
        eos_id=_named_token(directory, backend, config, "eos_token"),
        eos_ids=_eos_ids(directory, backend, config, len(table)),
        unk_id=_unk_id(directory, backend, source["model"], len(table)),
        add_bos=_adds_bos(backend, config, bos_id),
        # What stands before a text that begins with a letter, and is not in the text.
        adds_leading_space=kind != "ByteLevel" and _begins_with_space(backend, table),
        content_hash=_content_hash(source, config),
    )


def _load_backend(text: str, directory: ModelDirectory) -> Tokenizer:
    """Parse a tokenizer.json. Raises: ModelFileError, also where the Rust library panics."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise ModelFileError(directory.path / TOKENIZER, f"not a usable tokenizer: {error!s:.300}") from None
    except BaseException as error:  # pyo3's PanicException derives from BaseException alone.
        if type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(directory.path / TOKENIZER, f"not a usable tokenizer: {error!s:.300}") from None


def _serving_form(directory: ModelDirectory, source: dict[str, Any]) -> dict[str, Any]:
    """The file without what would silently change a prompt: truncation, padding, dropout.

    Control tokens are matched before normalisation, so that no other spelling of one normalises into it.
    """
    path = directory.path / TOKENIZER

    def malformed(what: str) -> NoReturn:
        refuse(path, f"{what} is missing or of the wrong type")

    model, added = source.get("model"), source.get("added_tokens", [])
    if not isinstance(model, dict):
        malformed("'model'")
    if model.get("type", "BPE") not in _MODEL_TYPES:
        refuse(path, f"model type {model.get('type')!r:.60} is not supported; {' and '.join(_MODEL_TYPES)} are")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        malformed("'added_tokens'")
    for token in added:
        if type(token.get("id")) is not int or not isinstance(token.get("content"), str):
            malformed("'id' or 'content' of an added token")
        if type(token.get("special")) is not bool:
            malformed(f"'special' of added token {token['id']}")
    return source | {
        "truncation": None,
        "padding": None,
        "model": model | {"dropout": None} if "dropout" in model else model,
        "added_tokens": [token | {"normalized": False} if token["special"] else token for token in added],
    }


def _decoder_kind(directory: ModelDirectory, decoder: Any) -> str:
    """'ByteLevel' or 'SentencePiece': how the file's decoder turns tokens into bytes."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    types = [step.get("type") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if "ByteLevel" in types:
        return "ByteLevel"
    if "ByteFallback" in types or "Metaspace" in types:
        return "SentencePiece"
    refuse(
        directory.path / TOKENIZER,
        f"decoder {types or decoder!r:.100} is not supported; ByteLevel, ByteFallback and Metaspace are",
    )


def _named_token(directory: ModelDirectory, backend: Tokenizer, config: dict[str, Any], name: str) -> int | None:
    """The id of a token that tokenizer_config.json names, as a text or as an object with 'content'."""
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    index = backend.token_to_id(text) if isinstance(text, str) else None
    if index is None:
        refuse(directory.path / CONFIG, f"{name} is {text!r:.60}, which is no token of {TOKENIZER}")
    return index


def _unk_id(directory: ModelDirectory, backend: Tokenizer, model: dict[str, Any], num_ids: int) -> int | None:
    """The library finds out only when it meets an unknown character."""
    text, index = model.get("unk_token"), model.get("unk_id")
    if text is not None:
        index = backend.token_to_id(text) if isinstance(text, str) else None
        if index is None:
            refuse(directory.path / TOKENIZER, f"unk_token is {text!r:.60}, which is no token")
    if index is not None and (type(index) is not int or not 0 <= index < num_ids):
        refuse(directory.path / TOKENIZER, f"unk_id is {index!r:.60}; ids are 0 to {num_ids - 1}")
    return index


def _eos_ids(directory: ModelDirectory, backend: Tokenizer, config: dict[str, Any], num_ids: int) -> tuple[int, ...]:
    """End ids of all three files that may name them; generation_config.json lists the ends of a turn."""
    named = _named_token(directory, backend, config, "eos_token")
    found = set() if named is None else {named}
    for name in ("generation_config.json", "config.json"):
        value = directory.read_json(name).get("eos_token_id") if directory.has(name) else None
        for index in value if isinstance(value, list) else [] if value is None else [value]:
            if type(index) is not int or not 0 <= index < num_ids:
                refuse(directory.path / name, f"eos_token_id has {index!r:.60}; ids are 0 to {num_ids - 1}")
            found.add(index)
    return tuple(sorted(found))


def _adds_bos(backend: Tokenizer, config: dict[str, Any], bos_id: int | None) -> bool:
    if bos_id is None:
        return False
    return config.get("add_bos_token") is True or backend.encode("").ids[:1] == [bos_id]


def _begins_with_space(backend: Tokenizer, table: tuple[bytes, ...]) -> bool:
    return b"".join(table[i] for i in backend.encode("a", add_special_tokens=False).ids).startswith(b" ")


def _content_hash(source: dict[str, Any], config: dict[str, Any]) -> str:
    chosen = [source, {key: config.get(key) for key in ("bos_token", "eos_token", "add_bos_token")}]
    return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()
