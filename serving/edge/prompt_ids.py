"""Chats and texts to prompt ids, with refusals as clients see them. Blocks: not for the event loop."""

from typing import Protocol

from headrace.model.chat_template import ChatTemplate, ChatTemplateError
from headrace.model.tokenizer import TokenizationError, Tokenizer
from headrace.serving.edge.bodies import ChatPrompt
from headrace.serving.edge.errors import ApiError, ErrorCode


class PromptEncoder(Protocol):
    """Both methods block and may be called from any thread."""

    def chat_ids(self, chat: ChatPrompt) -> list[int]:
        """Of a conversation in the model's template. Raises ApiError."""

    def text_ids(self, text: str, *, add_special: bool) -> list[int]:
        """Of a raw prompt; add_special: BOS first, where the vocabulary asks for it. Raises ApiError."""


class LocalEncoder:
    """In the calling thread. template: None for a model without one."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def text_ids(self, text: str, *, add_special: bool) -> list[int]:
        """A raw prompt is the caller's own whole prompt: control tokens written in it are control tokens."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, allow_special=True)
        if add_special and tokenizer.add_bos and tokenizer.bos_id is not None:
            return [tokenizer.bos_id, *ids]
        return ids

    def chat_ids(self, chat: ChatPrompt) -> list[int]:
        template = self._template
        if template is None:
            raise ApiError(
                ErrorCode.TEMPLATE_FAILED,
                "The served model has no chat template; use /v1/completions.",
                param="messages",
            )
        if not template.variables.issuperset(chat.variables):
            raise ApiError(
                ErrorCode.UNSUPPORTED_FIELD,
                "chat_template_kwargs has a name that the model's template does not read; it reads "
                f"{', '.join(sorted(template.variables)) or 'none'}.",
                param="chat_template_kwargs",
            )
        try:
            return template.render_ids(
                self._tokenizer,
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                variables=chat.variables,
            )
        except ChatTemplateError as error:
            raise ApiError(ErrorCode.TEMPLATE_FAILED, f"{error}.", param=error.param) from None
        except TokenizationError as error:
            raise ApiError(ErrorCode.INVALID_VALUE, f"{error}.", param="messages") from None
