"""A JSON body → typed, checked parameters. No tokenizer and no engine are needed here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.serving.core.request import SamplingParams
from headrace.serving.edge.chat_messages import Message, parse_messages
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.fields import MAX_PROMPTS, Endpoint, check_fields, check_stream_options
from headrace.serving.edge.pacing import AT_ONCE, Pacing
from headrace.serving.edge.values import token_ids, wrong_type

DEFAULT_COMPLETION_TOKENS = 16

Scalar = str | int | float | bool
Prompt = str | tuple[int, ...]
Values = Mapping[str, Any]
"""Parsed values by field name; the field table has checked their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How the caller wants the answer presented.

    ignored_fields: to be sent as a warning: unknown fields that were ignored (--allow-unknown-fields), and fields of
    messages that the model's template does not read.
    """

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_obfuscation: bool = False
    pacing: Pacing = AT_ONCE
    return_token_ids: bool = False
    logprobs: bool = False
    ignored_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    messages: tuple[Message, ...]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """What a body says: in the table's ranges, not yet held against the model (vocabulary, context, pages).

    prompts: of a completion, one choice each; chat: of a chat; exactly one of the two is set.
    has_seed False: the edge draws one. max_tokens None: the rest of the context. generate False: the prompt is computed
    and cached, and nothing comes out.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    chat: ChatPrompt | None
    sampling: SamplingParams
    has_seed: bool
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    options: JobOptions
    generate: bool = True


def parse_body(endpoint: Endpoint, body: Mapping[str, object], *, allow_unknown: bool = False) -> ParsedBody:
    """Raises ApiError, naming the field, for the first thing that is wrong."""
    fields = check_fields(endpoint, body, allow_unknown=allow_unknown)
    values: Values = fields.values
    is_chat = endpoint is Endpoint.CHAT
    generate: bool = values.get("generate", True)
    num_logprobs = _chat_logprobs(values) if is_chat else values.get("logprobs")
    max_tokens = _max_tokens(values, None if is_chat else DEFAULT_COMPLETION_TOKENS)
    if not generate:
        num_logprobs = None
    return ParsedBody(
        model=values.get("model"),
        prompts=() if is_chat else _prompts(values),
        chat=chat_prompt(values) if is_chat else None,
        sampling=_sampling(values, num_logprobs),
        has_seed="seed" in values,
        max_tokens=max_tokens if generate else 1,
        min_tokens=values.get("min_tokens", 0) if generate else 0,
        stop=values.get("stop", ()),
        stop_token_ids=tuple(dict.fromkeys(values.get("stop_token_ids", ()))),
        ignore_eos=values.get("ignore_eos", False),
        include_stop=values.get("include_stop_str_in_output", False),
        options=_options(values, logprobs=num_logprobs is not None, ignored=fields.ignored),
        generate=generate,
    )


def _sampling(values: Values, num_logprobs: int | None) -> SamplingParams:
    plain = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    )
    allowed = values.get("allowed_token_ids")
    return SamplingParams(
        num_logprobs=num_logprobs,
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        **{name: values[name] for name in plain if name in values},
    )


def _chat_logprobs(values: Values) -> int | None:
    """None = none wanted; otherwise how many alternatives."""
    top: int = values.get("top_logprobs", 0)
    if values.get("logprobs", False):
        return top
    if top:
        raise _conflict("top_logprobs needs logprobs to be true.", "top_logprobs")
    return None


def _max_tokens(values: Values, default: int | None) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise _conflict("max_tokens and max_completion_tokens differ; send one of them.", "max_tokens")
    given: int | None = new if old is None else old
    return default if given is None else given


def _options(values: Values, *, logprobs: bool, ignored: tuple[str, ...]) -> JobOptions:
    stream: Values = check_stream_options(values.get("stream_options", {})).values
    if stream.get("continuous_usage_stats") and not stream.get("include_usage"):
        raise _conflict("stream_options.continuous_usage_stats needs include_usage.", "stream_options")
    return JobOptions(
        stream=values.get("stream", False),
        include_usage=stream.get("include_usage", False),
        continuous_usage=stream.get("continuous_usage_stats", False),
        include_obfuscation=stream.get("include_obfuscation", False),
        pacing=Pacing(tokens=stream.get("chunk_tokens"), ms=stream.get("chunk_ms")),
        return_token_ids=values.get("return_token_ids", False),
        logprobs=logprobs,
        ignored_fields=ignored,
    )


def chat_prompt(values: Values) -> ChatPrompt:
    """messages and what belongs to them, from values that the field table has checked."""
    if "messages" not in values:
        raise _missing("messages")
    messages = parse_messages(values["messages"])
    continues = values.get("continue_final_message", False)
    generation_prompt = values.get("add_generation_prompt", not continues)
    if continues and generation_prompt:
        raise _conflict(
            "continue_final_message and add_generation_prompt contradict each other; set one to false.",
            "continue_final_message",
        )
    if continues and messages[-1]["role"] != "assistant":
        raise _conflict(
            "continue_final_message needs an assistant message at the end of messages.", "continue_final_message"
        )
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continues,
        variables=values.get("chat_template_kwargs", {}),
    )


def _prompts(values: Values) -> tuple[Prompt, ...]:
    value = values.get("prompt")
    if value is None:
        raise _missing("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string, token ids, or an array of either", value)
    if not value:
        raise ApiError(ErrorCode.EMPTY_PROMPT, "prompt is an empty array.", param="prompt")
    if not isinstance(value[0], str | list):
        return (token_ids("prompt", value),)
    if len(value) > MAX_PROMPTS:
        raise ApiError(ErrorCode.INVALID_VALUE, f"prompt must hold at most {MAX_PROMPTS} prompts.", param="prompt")
    return tuple(_prompt(f"prompt[{index}]", item) for index, item in enumerate(value))


def _prompt(where: str, value: object) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(where, "a string or token ids", value)
    return token_ids(where, value)


def _missing(name: str) -> ApiError:
    return ApiError(ErrorCode.MISSING_FIELD, f"{name} is required.", param=name)


def _conflict(message: str, param: str) -> ApiError:
    return ApiError(ErrorCode.CONFLICTING_FIELDS, message, param=param)
