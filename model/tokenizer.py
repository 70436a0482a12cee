"""Text to ids and ids to text. JAX-free, and safe to share between threads: nothing changes after construction."""

import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as Backend

from headrace.model.checkpoint_files import fields_of
from headrace.model.control_text import ControlText
from headrace.model.directory import ModelDirectory
from headrace.model.gguf_metadata import GGUFFile, read_gguf
from headrace.model.gguf_vocabulary import vocabulary_from_gguf
from headrace.model.tokenizer_files import vocabulary_from_directory
from headrace.model.vocabulary import Vocabulary, refuse


class TokenizationError(ValueError):
    """A text that cannot be tokenized; the message says where and why."""


class Tokenizer:
    """One vocabulary, ready to use.

    A byte-level vocabulary with gaps drops bytes that it has no token for (SmolLM2 lacks 21 of them, among others
    U+0004): ids are those of the reference tokenizer, so "a\\u0004b" has the ids of "ab", and a text may have none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special_by_text = {t: i for i in vocabulary.special_ids if len(t := self.token_text(i)) > 1}
        self._guarded = frozenset(self._special_by_text.values()) - {vocabulary.unk_id}
        self.control_text = ControlText(self._special_by_text)
        """Finds the text of control tokens."""

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes of each id; b"" where there is no token."""
        return self._vocabulary.token_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the highest id. The model may have more: rows that pad its embedding."""
        return len(self._vocabulary.token_bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control ids; their text is no part of what a model says."""
        return self._vocabulary.special_ids

    @property
    def bos_id(self) -> int | None:
        return self._vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        """The end-of-text id that the files declare; templates write its text."""
        return self._vocabulary.eos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, ascending; may be empty."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether the model expects ``bos_id`` before a raw prompt. ``encode`` never adds it; a chat template may."""
        return self._vocabulary.add_bos and self._vocabulary.bos_id is not None

    @property
    def content_hash(self) -> str:
        return self._vocabulary.content_hash

    def token_text(self, index: int) -> str:
        return self._vocabulary.token_bytes[index].decode("utf-8", "replace")

    def special_id(self, text: str) -> int:
        """The id of a control token by its text. Raises: KeyError."""
        return self._special_by_text[text]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text, exactly; nothing is added.

        allow_special: whether the text of a control token becomes its id. Without it such text is ordinary text and
        no control id comes out.
        Releases the interpreter lock for the most part: 5 MB take about 3.5 s and hold it for at most 30 ms.
        Raises: TokenizationError for a text with a lone surrogate.
        """
        if allow_special:
            return self._encode(self._vocabulary.backend, text)
        ids = self._encode(self._vocabulary.plain_backend, text)
        if self._guarded.isdisjoint(ids):
            return ids
        pieces = self.control_text.split_ordinary(text)
        return [i for piece in pieces for i in self._encode(self._vocabulary.plain_backend, piece)]

    def _encode(self, backend: Backend, text: str) -> list[int]:
        try:
            # Without offsets this takes two thirds of the time of `encode`.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise TokenizationError(
                    f"the text has half of a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                    f"{error.start}; send whole characters"
                ) from None
            raise
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids in [0, vocab_size); invalid and cut UTF-8 becomes U+FFFD.

        The space that the vocabulary puts before a text that stands alone is taken off.
        Raises: IndexError for an id outside the vocabulary.
        """
        table, skip = self.token_bytes, self.special_ids if skip_special else frozenset[int]()
        text = b"".join(table[i] for i in ids if i not in skip).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._vocabulary.adds_leading_space else text


def load_tokenizer(source: str | os.PathLike[str] | GGUFFile, *, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a GGUF file (its path, or its header already read), of a Hugging Face model directory, or of a
    checkpoint of either.

    model_vocab_size: rows of the model's embedding, to refuse a tokenizer that belongs to another model. Embeddings are
    often padded (DeepSeek-V2's by 2.4%), so up to 5% of the rows may be without a token.
    Raises: ModelFileError.
    """
    if isinstance(source, GGUFFile):
        vocabulary = vocabulary_from_gguf(source)
    elif Path(source).is_dir():
        directory = ModelDirectory(source)
        fields = fields_of(directory)
        vocabulary = vocabulary_from_directory(directory) if fields is None else vocabulary_from_gguf(fields)
    else:
        vocabulary = vocabulary_from_gguf(read_gguf(source))
    num_tokens = len(vocabulary.token_bytes)
    if model_vocab_size is not None and not 0.95 * model_vocab_size <= num_tokens <= model_vocab_size:
        refuse(vocabulary.path, f"the tokenizer has {num_tokens} tokens, the model {model_vocab_size}: not a pair")
    return Tokenizer(vocabulary)
