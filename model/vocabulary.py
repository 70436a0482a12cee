"""What a vocabulary is, wherever it was read from: the `tokenizers` object, the bytes of each id, the special ids."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tokenizers

from headrace.model.errors import ModelFileError

MAX_TOKENS = 1 << 20
"""Four times the largest published vocabularies (262,208)."""
MAX_TOKEN_TEXT = 1 << 24
"""Characters of all tokens together; the largest published vocabularies have about 2 million."""
SPACE_MARK = "\u2581"
"""How SentencePiece vocabularies write a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A vocabulary as read and checked.

    backend: turns the text of control tokens into their ids; plain_backend: reads such text as any other. Two objects,
    because that is a setting of the object, and changing one that other threads use fails. No truncation, no padding.
    token_bytes: the bytes of each id; b"" for an id without a token.
    special_ids: control ids. eos_id: the declared end of a text; eos_ids: all that end a generation, ascending.
    unk_id: the id that stands for what the vocabulary cannot express, or None (the text is dropped).
    adds_leading_space: one space is put before a text that stands alone, and taken off again by ``decode``.
    content_hash: SHA-256 in hex over all that determines ids and text.
    """

    path: Path
    backend: tokenizers.Tokenizer
    plain_backend: tokenizers.Tokenizer
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    eos_ids: tuple[int, ...]
    unk_id: int | None
    add_bos: bool
    adds_leading_space: bool
    content_hash: str


def refuse(path: Path, reason: str) -> NoReturn:
    raise ModelFileError(path, reason)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte, as byte-level BPE spells bytes.

    Printable Latin-1 bytes are themselves; the other 68, in order, are U+0100 and up.
    Source: https://github.com/openai/gpt-2, encoder.py.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def byte_level_table(tokens: Mapping[int, str], literal_ids: Iterable[int]) -> tuple[bytes, ...]:
    """Bytes per id of a byte-level vocabulary.

    literal_ids: tokens that are spelled as plain text (control and added tokens). So is any token with a character
    outside the alphabet, as in the `tokenizers` decoder.
    """
    alphabet = byte_alphabet()
    literal = frozenset(literal_ids)

    def token_bytes(index: int, text: str) -> bytes:
        if index not in literal:
            try:
                return bytes(map(alphabet.__getitem__, text))
            except KeyError:
                pass
        return text.encode("utf-8")

    return _table({index: token_bytes(index, text) for index, text in tokens.items()})


def sentencepiece_table(tokens: Mapping[int, str], literal_ids: Iterable[int]) -> tuple[bytes, ...]:
    """Bytes per id of a SentencePiece vocabulary: <0xNN> is a byte, the space mark a space."""
    byte_tokens = {f"<0x{byte:02X}>": bytes((byte,)) for byte in range(256)}
    literal = frozenset(literal_ids)

    def token_bytes(index: int, text: str) -> bytes:
        if index in literal:
            return text.encode("utf-8")
        return byte_tokens.get(text) or text.replace(SPACE_MARK, " ").encode("utf-8")

    return _table({index: token_bytes(index, text) for index, text in tokens.items()})


def _table(by_id: Mapping[int, bytes]) -> tuple[bytes, ...]:
    return tuple(by_id.get(index, b"") for index in range(max(by_id) + 1))


def check_size(path: Path, num_tokens: int, text_length: int) -> None:
    if num_tokens == 0:
        refuse(path, "the vocabulary is empty")
    if num_tokens > MAX_TOKENS:
        refuse(path, f"the vocabulary has {num_tokens} tokens; the limit is {MAX_TOKENS}")
    if text_length > MAX_TOKEN_TEXT:
        refuse(path, f"the tokens have {text_length} characters in all; the limit is {MAX_TOKEN_TEXT}")
