"""Vocabulary from the ``tokenizer.ggml.*`` fields of a GGUF file.

Two kinds are supported: byte-level BPE ("gpt2") with a known pre-tokenizer, and SentencePiece BPE ("llama"). The
pre-tokenizer decides where tokens may begin, and a wrong one gives quietly wrong ids, so an unknown name is an error.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "Tokenizer"; split patterns as in the tokenizer.json
of the models that the names stand for.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from headrace.model.gguf_metadata import GGUFFile
from headrace.model.vocabulary import (
    SPACE_MARK,
    Vocabulary,
    byte_level_table,
    check_size,
    refuse,
    sentencepiece_table,
)

PREFIX = "tokenizer.ggml."

_WORDS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS_QWEN2 = _WORDS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Value of tokenizer.ggml.pre -> how text is split. "gpt2": GPT-2's own pattern; "digits": each digit first, then that.
_SPLITS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "dbrx", "jais"), "gpt2")
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits")
    | dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), "llama3")
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2")
)
# Control tokens that end a text or a turn. A GGUF file declares one end id, while models trained on chats end a turn
# with one and a document with another; without this list the second would run on to the length limit.
_END_TEXTS = frozenset(
    ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")
)


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Fields:
    """The tokenizer fields of one file, checked as they are read."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.path
        self.values: Mapping[str, Any] = gguf.fields

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(PREFIX + name, default)
        if value is not default and type(value) is not kind:
            refuse(self.path, f"field {PREFIX}{name} is {type(value).__name__}; it must be {kind.__name__}")
        return value

    def need(self, name: str, kind: type) -> Any:
        value = self.get(name, kind)
        if value is None:
            refuse(self.path, f"field {PREFIX}{name} is missing")
        return value

    def array(self, name: str, kind: type, length: int | None = None) -> list[Any] | None:
        values: list[Any] | None = self.get(name, list)
        if values is None:
            return None
        if any(type(value) is not kind for value in values):
            refuse(self.path, f"field {PREFIX}{name} must hold {kind.__name__} values only")
        if length is not None and len(values) != length:
            refuse(self.path, f"field {PREFIX}{name} has {len(values)} elements; there are {length} tokens")
        return values

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value: int | None = self.get(name, int)
        if value is not None and not 0 <= value < num_tokens:
            refuse(self.path, f"field {PREFIX}{name} is {value}; ids are 0 to {num_tokens - 1}")
        return value

    def content_hash(self) -> str:
        """SHA-256 over every tokenizer field but the template, which has a hash of its own."""
        chosen = {key: value for key, value in self.values.items() if key.startswith(PREFIX)}
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


def vocabulary_from_gguf(gguf: GGUFFile) -> Vocabulary:
    """Raises: ModelFileError, naming the file and the field, for anything missing, damaged or not supported."""
    fields = _Fields(gguf)
    kind = fields.need("model", str)
    if kind not in ("gpt2", "llama"):
        refuse(gguf.path, f"tokenizer model {kind!r:.60} is not supported; 'gpt2' (byte-level BPE) and 'llama' are")
    fields.need("tokens", list)
    tokens: list[str] = fields.array("tokens", str) or []
    check_size(gguf.path, len(tokens), sum(map(len, tokens)))
    ids: dict[str, int] = {}
    for index, text in enumerate(tokens):
        if ids.setdefault(text, index) != index:
            refuse(gguf.path, f"tokens {ids[text]} and {index} are both {text!r:.60}")
    types = fields.array("token_type", int, len(tokens)) or [TokenType.NORMAL] * len(tokens)
    strange = set(types) - set(TokenType)
    if strange:
        refuse(gguf.path, f"field {PREFIX}token_type has unknown value {min(strange)}; known are 1 to 6")

    unk_id = fields.token_id("unknown_token_id", len(tokens))
    special_ids = frozenset(i for i, t in enumerate(types) if t in (TokenType.CONTROL, TokenType.UNKNOWN))
    literal_ids = special_ids | {i for i, t in enumerate(types) if t == TokenType.USER_DEFINED}
    adds_leading_space = kind == "llama" and fields.get("add_space_prefix", bool, True)
    if kind == "gpt2":
        split, merges = _split(fields), _needed_merges(fields, ids)
        add_bos = split == "llama3"
        backends = [_byte_level(ids, merges, split) for _ in range(2)]
        table = byte_level_table(dict(enumerate(tokens)), literal_ids)
        unk_id = None  # Byte-level BPE drops what it has no token for; the field only names a control id.
    else:
        unk_id = 0 if unk_id is None else unk_id
        add_bos = True
        merges = _merges(fields, ids) or _merges_of_scores(ids, types, _scores(fields, len(tokens)))
        backends = [_sentencepiece(ids, merges, tokens[unk_id], adds_leading_space) for _ in range(2)]
        table = sentencepiece_table(dict(enumerate(tokens)), literal_ids)
    # An empty token cannot occur in a text.
    added = [(tokens[i], i in special_ids) for i in sorted(literal_ids) if tokens[i]]
    for each in backends:
        each.add_tokens([AddedToken(text, normalized=False, special=special) for text, special in added])
    backend, plain_backend = backends
    plain_backend.encode_special_tokens = True

    eos_ids = {fields.token_id(name, len(tokens)) for name in ("eos_token_id", "eot_token_id", "eom_token_id")}
    eos_ids |= {i for i in special_ids if tokens[i] in _END_TEXTS}
    return Vocabulary(
        path=gguf.path,
        backend=backend,
        plain_backend=plain_backend,
        token_bytes=table,
        special_ids=special_ids,
        bos_id=fields.token_id("bos_token_id", len(tokens)),
        eos_id=fields.token_id("eos_token_id", len(tokens)),
        eos_ids=tuple(sorted(i for i in eos_ids if i is not None)),
        unk_id=unk_id,
        add_bos=fields.get("add_bos_token", bool, add_bos),
        adds_leading_space=adds_leading_space,
        content_hash=fields.content_hash(),
    )


def _merges(fields: _Fields, ids: Mapping[str, int]) -> list[tuple[str, str]] | None:
    """Pairs of tokens; spaces are spelled otherwise in both kinds of vocabulary, so the first one is the border."""
    lines = fields.array("merges", str)
    if lines is None:
        return None
    merges = []
    for index, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not left or not right:
            refuse(fields.path, f"merge {index} is {line!r:.60}; it must be two tokens with a space between")
        if not (left in ids and right in ids and left + right in ids):
            unknown = next(part for part in (left, right, left + right) if part not in ids)
            refuse(fields.path, f"merge {index} ({line!r:.60}) needs {unknown!r:.60}, which is no token")
        merges.append((left, right))
    return merges


def _needed_merges(fields: _Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = _merges(fields, ids)
    if merges is None:
        refuse(fields.path, f"field {PREFIX}merges is missing")
    return merges


def _split(fields: _Fields) -> str:
    name = fields.need("pre", str)
    if name not in _SPLITS:
        refuse(fields.path, f"pre-tokenizer {name!r:.60} ({PREFIX}pre) is not known; known are {', '.join(_SPLITS)}")
    return _SPLITS[name]


def _byte_level(ids: dict[str, int], merges: list[tuple[str, str]], split: str) -> Tokenizer:
    # Llama 3 takes a word that is itself a token whole, without merging up to it.
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=split == "llama3"))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split in ("llama3", "qwen2"):
        pattern = Regex(_WORDS_LLAMA3 if split == "llama3" else _WORDS_QWEN2)
        steps.append(pre_tokenizers.Split(pattern, behavior="isolated"))
    elif split == "digits":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt2", "digits")))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _scores(fields: _Fields, num_tokens: int) -> list[float]:
    scores = fields.array("scores", float, num_tokens)
    if scores is None:
        refuse(fields.path, f"fields {PREFIX}scores and {PREFIX}merges are missing; one is needed")
    if not all(map(math.isfinite, scores)):
        refuse(fields.path, f"field {PREFIX}scores has a value that is not finite")
    return scores


def _merges_of_scores(ids: Mapping[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece vocabulary implies: the pair whose union scores highest goes first."""
    mergeable = {text for text, index in ids.items() if types[index] in (TokenType.NORMAL, TokenType.UNUSED)}
    ranked = sorted(mergeable, key=lambda text: (-scores[ids[text]], ids[text]))
    return [
        (text[:cut], text[cut:])
        for text in ranked
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]


def _sentencepiece(
    ids: dict[str, int], merges: list[tuple[str, str]], unk_token: str, adds_leading_space: bool
) -> Tokenizer:
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=has_bytes)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE_MARK)] if adds_leading_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    return backend
