"""From a parsed body to admitted requests, off the event loop: byte limits, template, tokenizer, admission.

Work runs in a small pool of threads (the tokenizer releases the interpreter lock while it works), and that of long
prompts in a process of its own, so that a prompt delays neither other streams nor health checks. Whoever waits may go
away: work that has not begun is dropped.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headrace.model.chat_template import ChatTemplate
from headrace.model.tokenizer import Tokenizer
from headrace.serving.core.admission import Limits, validate
from headrace.serving.core.request import Rejection, Request, RequestId, SamplingParams
from headrace.serving.edge.bodies import ChatPrompt, ParsedBody, Prompt
from headrace.serving.edge.chat_messages import texts
from headrace.serving.edge.errors import ApiError, ErrorCode, from_rejection
from headrace.serving.edge.prompt_ids import LocalEncoder, PromptEncoder
from headrace.serving.edge.shared_prefixes import SharedPrefixes

NUM_THREADS = 2
MAX_WAITING_JOBS = 256
MAX_WAITING_BYTES = 64 << 20
"""Prompt bytes of all jobs that wait for a thread or are in one."""
BULK_BYTES = 8 << 10
BULK_MESSAGES = 64
"""Prompts of more text or messages are long: on a CPU of 2 cores 3.6 ms and 1.5 ms of one of them."""
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
    """What a parsed body is held against. request_ids and seeds: one per prompt. shared_namespace: of prefixes that the
    operator declared to be common to all tenants."""

    limits: Limits
    namespace: bytes
    tenant: str
    request_ids: tuple[RequestId, ...]
    seeds: tuple[int, ...]
    shared_namespace: bytes = b""
    shared_prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)


class Preparation:
    """Owns the threads; ``close`` ends them. bulk: encodes long prompts; None has the threads do it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_prompt_bytes: int,
        bulk: PromptEncoder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_prompt_bytes = max_prompt_bytes
        self._encoder = LocalEncoder(tokenizer, template)
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="headrace-prepare")
        self._bulk = bulk
        # Waits for the process, which has one job at a time.
        self._bulk_pool = ThreadPoolExecutor(1, thread_name_prefix="headrace-bulk")
        self._num_waiting = 0
        self._bytes_waiting = 0

    def close(self) -> None:
        for pool in (self._pool, self._bulk_pool):
            pool.shutdown(wait=False, cancel_futures=True)

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

    def sizes(self, body: ParsedBody) -> tuple[int, ...]:
        """Bytes of text of each prompt; of ids, four for each. Raises ApiError for too many, and for no Unicode."""
        return self._checked_sizes(body.chat, body.prompts)

    async def requests(self, body: ParsedBody, sizes: Sequence[int], admission: Admission) -> tuple[Request, ...]:
        """One admitted request per prompt. sizes: as ``sizes``. Raises ApiError."""
        return await self._encode(body.chat, sum(sizes), lambda encoder: _requests(encoder, body, admission))

    async def token_ids(self, chat: ChatPrompt | None, prompt: str | None, *, add_special: bool = True) -> list[int]:
        """Of a chat or of a text, as a request with it would have them."""
        if chat is not None:
            size = sum(self._checked_sizes(chat, ()))
            return await self._encode(chat, size, lambda encoder: encoder.chat_ids(chat))
        text = prompt or ""
        size = sum(self._checked_sizes(None, (text,)))
        return await self._encode(None, size, lambda encoder: encoder.text_ids(text, add_special=add_special))

    async def text(self, ids: tuple[int, ...]) -> str:
        """The exact text of ids, control tokens included."""
        work = functools.partial(self._tokenizer.decode, ids, skip_special=False)
        return await self._in_thread(self._pool, 4 * len(ids), work)

    async def _encode(self, chat: ChatPrompt | None, size: int, work: Callable[[PromptEncoder], T]) -> T:
        """size: bytes of all texts."""
        is_long = size > BULK_BYTES or (chat is not None and len(chat.messages) > BULK_MESSAGES)
        if self._bulk is not None and is_long:
            return await self._in_thread(self._bulk_pool, size, functools.partial(work, self._bulk))
        return await self._in_thread(self._pool, size, functools.partial(work, self._encoder))

    async def _in_thread(self, pool: ThreadPoolExecutor, size: int, work: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING_JOBS or self._bytes_waiting + size > MAX_WAITING_BYTES:
            raise ApiError(
                ErrorCode.QUEUE_FULL, "Too many prompts wait for the tokenizer; retry later.", retry_after_ms=1000
            )
        self._num_waiting += 1
        self._bytes_waiting += size
        loop = asyncio.get_running_loop()
        future = pool.submit(work)
        future.add_done_callback(lambda _: self._thread_done(loop, size))
        return await asyncio.wrap_future(future)

    def _thread_done(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        """Called in the thread, or where the job was cancelled; counts belong to the loop, which may be gone."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._count_out, size)

    def _count_out(self, size: int) -> None:
        self._num_waiting -= 1
        self._bytes_waiting -= size

    def _checked_sizes(self, chat: ChatPrompt | None, prompts: tuple[Prompt, ...]) -> tuple[int, ...]:
        """Of a chat, or of each prompt; refuses more than the limit per prompt, and texts that are not Unicode."""
        if chat is not None:
            total = sum(_num_bytes("messages", text) for message in chat.messages for text in texts(message))
            self._refuse_long("messages", total)
            return (total,)
        sizes = []
        for prompt in prompts:
            size = _num_bytes("prompt", prompt) if isinstance(prompt, str) else 4 * len(prompt)
            self._refuse_long("prompt", size)
            sizes.append(size)
        return tuple(sizes)

    def _refuse_long(self, param: str, size: int) -> None:
        if size > self._max_prompt_bytes:
            raise ApiError(
                ErrorCode.REQUEST_TOO_LARGE,
                f"{param} has {size} bytes of text; at most {self._max_prompt_bytes} can fit the context.",
                param=param,
            )


def _num_bytes(param: str, text: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise ApiError(
            ErrorCode.INVALID_VALUE, f"{param} holds half of a surrogate pair, which is no Unicode text.", param=param
        ) from None


def _requests(encoder: PromptEncoder, body: ParsedBody, admission: Admission) -> tuple[Request, ...]:
    if body.chat is not None:
        ids: list[Sequence[int]] = [encoder.chat_ids(body.chat)]
    else:
        ids = [encoder.text_ids(p, add_special=True) if isinstance(p, str) else p for p in body.prompts]
    return tuple(_admitted(body, admission, index, prompt) for index, prompt in enumerate(ids))


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
    num_shared = admission.shared_prefixes.num_shared(outcome.prompt_ids)
    if not num_shared:
        return outcome
    return replace(outcome, shared_prefix_tokens=num_shared, shared_namespace=admission.shared_namespace)
