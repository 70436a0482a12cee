"""Tokenizer and chat template of the served model, as the edge and its process for long prompts both load them."""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from headrace.model.chat_template import ChatTemplate, load_chat_template
from headrace.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """model: path. now: what the template shows as the date."""

    model: str
    vocab_size: int
    now: datetime


@dataclass(frozen=True, slots=True)
class TextTools:
    """Between text and token ids. template: None for a model without one, which has no chat."""

    tokenizer: Tokenizer
    template: ChatTemplate | None

    @property
    def content_hash(self) -> str:
        """Equal where the same prompts have the same ids."""
        parts = (self.tokenizer.content_hash, self.template.content_hash if self.template else "")
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load_text_tools(options: TextOptions) -> TextTools:
    """Raises: ModelFileError."""
    tokenizer = load_tokenizer(options.model, model_vocab_size=options.vocab_size)
    return TextTools(tokenizer, load_chat_template(options.model, now=options.now))
