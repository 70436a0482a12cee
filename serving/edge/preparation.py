"""From a parsed body to admitted requests, off the event loop: byte limits, template, tokenizer, admission.

Work runs in a small pool of threads (the tokenizer releases the interpreter lock while it works), so that a long
prompt delays neither other streams nor health checks. Whoever waits may go away: work that has not begun is dropped.
"""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from headrace.model.chat_template import ChatTemplate, ChatTemplateError
from headrace.model.tokenizer import TokenizationError, Tokenizer
from headrace.serving.core.admission import Limits, validate
from headrace.serving.core.request import Rejection, Request, RequestId, SamplingParams
from headrace.serving.edge.bodies import ChatPrompt, ParsedBody, Prompt
from headrace.serving.edge.chat_messages import texts
from headrace.serving.edge.errors import ApiError, ErrorCode, from_rejection

NUM_THREADS = 2
MAX_WAITING_JOBS = 256
MAX_WAITING_BYTES = 64 << 20
"""Prompt bytes of all jobs that wait for a thread or are in one."""
MAX_UNREAD = 8
NAMESPACE_VERSION = "headrace-cache/1"

T = TypeVar("T")


def cache_namespace(*, model_hash: str, tokenizer_hash: str, template_hash: str, kv_dtype: str, tenant: str) -> bytes:
    """32 bytes that seed the prefix hash: KV is shared only where all of this is equal. Lengths keep parts apart."""
    digest = hashlib.sha256()
    for part in (NAMESPACE_VERSION, model_hash, tokenizer_hash, template_hash, kv_dtype, tenant):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a parsed body is held against. request_ids and seeds: one per prompt."""

    limits: Limits
    namespace: bytes
    tenant: str
    request_ids: tuple[RequestId, ...]
    seeds: tuple[int, ...]


class Preparation:
    """Owns the threads; ``close`` ends them."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, max_prompt_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_prompt_bytes = max_prompt_bytes
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="headrace-prepare")
        self._num_waiting = 0
        self._bytes_waiting = 0

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def unread_fields(self, chat: ChatPrompt | None) -> tuple[str, ...]:
        """Fields of messages that the model's template does not read; at most MAX_UNREAD of them are named."""
        unread = self._template.unread_fields if self._template is not None else ()
        if chat is None or not unread:
            return ()
        found = (
            f"messages[{index}].{name}"
            for index, message in enumerate(chat.messages)
            for name in unread
            if name in message
        )
        return tuple(itertools.islice(found, MAX_UNREAD))

    async def requests(self, body: ParsedBody, admission: Admission) -> tuple[Request, ...]:
        """One admitted request per prompt. Raises ApiError."""
        size = self._checked_size(body.chat, body.prompts)
        return await self._in_thread(size, lambda: self._requests(body, admission))

    async def token_ids(self, chat: ChatPrompt | None, prompt: str | None, *, add_special: bool = True) -> list[int]:
        """Of a chat or of a text, as a request with it would have them."""
        if chat is not None:
            size = self._checked_size(chat, ())
            return await self._in_thread(size, lambda: self._chat_ids(chat))
        text = prompt or ""
        size = self._checked_size(None, (text,))
        return await self._in_thread(size, lambda: self._text_ids(text, add_special))

    async def text(self, ids: tuple[int, ...]) -> str:
        """The exact text of ids, control tokens included."""
        return await self._in_thread(4 * len(ids), lambda: self._tokenizer.decode(ids, skip_special=False))

    async def _in_thread(self, size: int, work: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING_JOBS or self._bytes_waiting + size > MAX_WAITING_BYTES:
            raise ApiError(
                ErrorCode.QUEUE_FULL, "Too many prompts wait for the tokenizer; retry later.", retry_after_ms=1000
            )
        self._num_waiting += 1
        self._bytes_waiting += size
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._thread_done(loop, size))
        return await asyncio.wrap_future(future)

    def _thread_done(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        """Called in the thread, or where the job was cancelled; counts belong to the loop, which may be gone."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._count_out, size)

    def _count_out(self, size: int) -> None:
        self._num_waiting -= 1
        self._bytes_waiting -= size

    def _checked_size(self, chat: ChatPrompt | None, prompts: tuple[Prompt, ...]) -> int:
        """Bytes of all texts; refuses more than the limit per prompt, and texts that are not Unicode."""
        total = 0
        if chat is not None:
            total = sum(_num_bytes("messages", text) for message in chat.messages for text in texts(message))
            self._refuse_long("messages", total)
        for prompt in prompts:
            size = _num_bytes("prompt", prompt) if isinstance(prompt, str) else 4 * len(prompt)
            self._refuse_long("prompt", size)
            total += size
        return total

    def _refuse_long(self, param: str, size: int) -> None:
        if size > self._max_prompt_bytes:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"{param} has {size} bytes of text; at most {self._max_prompt_bytes} can fit the context.",
                param=param,
            )

    # In a thread of the pool

    def _requests(self, body: ParsedBody, admission: Admission) -> tuple[Request, ...]:
        if body.chat is not None:
            ids: list[Sequence[int]] = [self._chat_ids(body.chat)]
        else:
            ids = [self._text_ids(item, True) if isinstance(item, str) else item for item in body.prompts]
        return tuple(_admitted(body, admission, index, prompt) for index, prompt in enumerate(ids))

    def _text_ids(self, text: str, add_special: bool) -> list[int]:
        """A raw prompt is the caller's own whole prompt: control tokens written in it are control tokens."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, allow_special=True)
        if add_special and tokenizer.add_bos and tokenizer.bos_id is not None:
            return [tokenizer.bos_id, *ids]
        return ids

    def _chat_ids(self, chat: ChatPrompt) -> list[int]:
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


def _num_bytes(param: str, text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{param} holds half of a surrogate pair, which is no Unicode text.", param=param
        ) from None


def _admitted(body: ParsedBody, admission: Admission, index: int, prompt_ids: Sequence[int]) -> Request:
    where = "messages" if body.chat is not None else "prompt" if len(body.prompts) == 1 else f"prompt[{index}]"
    if not prompt_ids:
        raise ApiError(ErrorCode.EMPTY_PROMPT, f"{where} has no tokens; it must have at least one.", param=where)
    sampling: SamplingParams = replace(body.sampling, seed=admission.seeds[index])
    outcome = validate(
        admission.limits,
        request_id=admission.request_ids[index],
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        cache_namespace=admission.namespace,
        tenant=admission.tenant,
    )
    if isinstance(outcome, Rejection):
        named = replace(outcome, param=where) if outcome.param == "prompt" else outcome
        raise from_rejection(named)
    return outcome
