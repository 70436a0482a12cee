"""The field table: what every body field of both endpoints means here. PROTOCOL.md is generated from it.

A field is *applied*, *inert* (named here, without effect on the output), or *refused* unless it is at the value that
means "not used". Every other name is an error with the nearest known name. null always means the default.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.serving.core.admission import MAX_LOGIT_BIAS, MAX_TEMPERATURE, REPETITION_PENALTY_RANGE
from headrace.serving.core.request import MAX_LOGPROBS, MAX_STOP_IDS
from headrace.serving.edge.errors import ApiError, ErrorCode
from headrace.serving.edge.values import (
    BiasMap,
    Flag,
    Kind,
    OnlyDefault,
    Real,
    ScalarMap,
    Shaped,
    StopStrings,
    Text,
    TokenIds,
    Whole,
)

MAX_MESSAGES = 1024
MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_MS = 10_000
TEMPLATE_ARGUMENTS = ScalarMap(16, 1024)


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


class Treatment(StrEnum):
    APPLIED = "applied"
    INERT = "inert"
    REFUSED = "refused"


BOTH = (Endpoint.CHAT, Endpoint.COMPLETION)
CHAT = (Endpoint.CHAT,)
COMPLETION = (Endpoint.COMPLETION,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """default: as the protocol page shows it. note: one line, "" where the name says it all."""

    name: str
    treatment: Treatment
    kind: Kind
    endpoints: tuple[Endpoint, ...] = BOTH
    default: str = "null"
    note: str = ""


def _applied(
    name: str, kind: Kind, default: str = "null", note: str = "", endpoints: tuple[Endpoint, ...] = BOTH
) -> Field:
    return Field(name=name, treatment=Treatment.APPLIED, kind=kind, endpoints=endpoints, default=default, note=note)


def _inert(name: str, note: str = "", endpoints: tuple[Endpoint, ...] = BOTH) -> Field:
    return Field(
        name=name, treatment=Treatment.INERT, kind=Shaped("anything"), endpoints=endpoints, default="null", note=note
    )


def _refused(name: str, *at_default: object, endpoints: tuple[Endpoint, ...] = BOTH, note: str = "") -> Field:
    return Field(
        name=name,
        treatment=Treatment.REFUSED,
        kind=OnlyDefault(at_default),
        endpoints=endpoints,
        default="null",
        note=note,
    )


def _elsewhere(name: str, *at_default: object, header: str, frames: str = "`create`") -> Field:
    """Of a request, and not of its body."""
    kind = OnlyDefault(at_default, f"the header {header}, or on the native WebSocket in {frames}")
    note = f"of the header {header}, or of {frames}"
    return Field(name=name, treatment=Treatment.REFUSED, kind=kind, note=note)


_APPLIED: tuple[Field, ...] = (
    _applied("model", Text(256), "the served model", "another name than a served one is 404"),
    _applied("messages", Shaped(f"array of 1 to {MAX_MESSAGES} messages"), "required", "see *Messages*", CHAT),
    _applied(
        "prompt",
        Shaped(f"string, token ids, or an array of at most {MAX_PROMPTS} of either"),
        "required",
        "each prompt of a list is a choice of its own",
        COMPLETION,
    ),
    _applied("temperature", Real(0, MAX_TEMPERATURE), "1", "0 is greedy"),
    _applied("top_k", Whole(0), "0", "0 is off"),
    _applied("top_p", Real(0, 1, above_low=True), "1"),
    _applied("min_p", Real(0, 1), "0"),
    _applied("seed", Whole(0, 2**63 - 1), "drawn by the server"),
    _applied("repetition_penalty", Real(*REPETITION_PENALTY_RANGE), "1", "over prompt and output"),
    _applied("presence_penalty", Real(-2, 2), "0", "over the output"),
    _applied("frequency_penalty", Real(-2, 2), "0", "over the output"),
    _applied("logit_bias", BiasMap(MAX_LOGIT_BIAS, 100), "{}"),
    _applied("allowed_token_ids", TokenIds(1, 65_536), "null", "only these ids can be sampled"),
    _applied("max_tokens", Whole(1), "16 for completions, the rest of the context for chat"),
    _applied("max_completion_tokens", Whole(1), "as max_tokens", "another name for max_tokens"),
    _applied(
        "min_tokens", Whole(0), "0", "so many tokens come before a stop id; the last of them may complete a stop string"
    ),
    _applied("stop", StopStrings(MAX_STOP_STRINGS, MAX_STOP_CHARS), "[]", "matched across tokens, not shown"),
    _applied("stop_token_ids", TokenIds(0, MAX_STOP_IDS), "[]", "beside the model's end-of-sequence ids"),
    _applied("include_stop_str_in_output", Flag(), "false", "show the stop string or the stop id's text"),
    _applied("ignore_eos", Flag(), "false"),
    _applied(
        "generate", Flag(), "true", "false: the prompt is computed and cached for later ones, and no output comes"
    ),
    _applied("logprobs", Flag(), "false", "of the model's own distribution, before bias and temperature", CHAT),
    _applied("top_logprobs", Whole(0, MAX_LOGPROBS), "0", "needs logprobs", CHAT),
    _applied(
        "logprobs",
        Whole(0, MAX_LOGPROBS),
        "null",
        "of the model's own distribution, before bias and temperature; 0 gives the chosen tokens alone",
        COMPLETION,
    ),
    _applied("stream", Flag(), "false", "over HTTP; the native WebSocket always streams"),
    _applied("stream_options", Shaped("object, see its own table"), "{}", "over HTTP it needs stream"),
    _applied("return_token_ids", Flag(), "false", "adds token_ids and prompt_token_ids"),
    _applied("add_generation_prompt", Flag(), "true", endpoints=CHAT),
    _applied(
        "continue_final_message",
        Flag(),
        "false",
        "the output continues the last message; needs add_generation_prompt false",
        CHAT,
    ),
    _applied("chat_template_kwargs", TEMPLATE_ARGUMENTS, "{}", "names that the model's template reads", CHAT),
)

_INERT: tuple[Field, ...] = (
    _inert("user"),
    _inert("metadata"),
    _inert("store", "nothing is stored"),
    _inert("safety_identifier"),
    _inert("prompt_cache_key", "the prefix cache needs no hint"),
    _inert("prompt_cache_retention"),
    _inert("parallel_tool_calls", "there are no tools", CHAT),
)

_REFUSED: tuple[Field, ...] = (
    _refused("n", 1),
    _refused("best_of", 1, endpoints=COMPLETION),
    _refused("echo", False),
    _refused("suffix", "", endpoints=COMPLETION),
    _refused("tools", [], endpoints=CHAT),
    _refused("tool_choice", "none", "auto", endpoints=CHAT),
    _refused("functions", [], endpoints=CHAT),
    _refused("function_call", "none", "auto", endpoints=CHAT),
    _refused("response_format", {"type": "text"}),
    _refused("structured_outputs"),
    _refused("guided_json"),
    _refused("guided_regex"),
    _refused("guided_choice"),
    _refused("guided_grammar"),
    _refused("guided_decoding_backend"),
    _refused("guided_whitespace_pattern"),
    _refused("prompt_logprobs"),
    _refused("logits_processors", []),
    _refused("bad_words", []),
    _elsewhere("priority", 0, header="x-headrace-priority"),
    _elsewhere("deadline_ms", header="x-headrace-deadline-ms"),
    _elsewhere("expect_contract", header="x-headrace-expect-contract", frames="`hello` or `create`"),
    _refused("use_beam_search", False),
    _refused("length_penalty", 1, 1.0),
    _refused("early_stopping", False),
    _refused("truncate_prompt_tokens"),
    _refused("skip_special_tokens", True),
    _refused("spaces_between_special_tokens", True),
    _refused("detokenize", True),
    _refused("add_special_tokens", False, endpoints=CHAT, note="the template writes them"),
    _refused("add_special_tokens", True, endpoints=COMPLETION, note="ids as the tokenizer file says"),
    _refused("return_tokens_as_token_ids", False),
    _refused("prompt_embeds", endpoints=COMPLETION),
    _refused("chat_template", endpoints=CHAT, note="templates come from the model or the operator only"),
    _refused("documents", [], endpoints=CHAT),
    _refused("mm_processor_kwargs", {}, endpoints=CHAT),
    _refused("modalities", ["text"], endpoints=CHAT),
    _refused("audio", endpoints=CHAT),
    _refused("prediction", endpoints=CHAT),
    _refused("reasoning_effort", "none", endpoints=CHAT),
    _refused("include_reasoning", True, endpoints=CHAT),
    _refused("verbosity", "medium", endpoints=CHAT),
    _refused("web_search_options", endpoints=CHAT),
    _refused("service_tier", "auto", "default"),
    _refused("cache_salt"),
    _refused("kv_transfer_params"),
    _refused("request_id"),
)

FIELDS: tuple[Field, ...] = _APPLIED + _INERT + _REFUSED

STREAM_OPTION_FIELDS: tuple[Field, ...] = (
    _applied("include_usage", Flag(), "false", "a last chunk with usage and no choices; native: `done` always has it"),
    _applied(
        "continuous_usage_stats", Flag(), "false", "usage so far in every chunk; needs include_usage; native: see `n`"
    ),
    _applied(
        "chunk_tokens", Whole(1, MAX_CHUNK_TOKENS), "null", "so many new tokens of a choice make a delta or chunk"
    ),
    _applied("chunk_ms", Whole(1, MAX_CHUNK_MS), "null", "so many ms after the first of them the delta is made"),
    _applied("include_obfuscation", Flag(), "false", "pads deltas and chunks; OpenAI's own service has true"),
)


TOKENIZE_FIELDS: tuple[Field, ...] = (
    _applied("model", Text(256), "the served model"),
    _applied("prompt", Text(1 << 22), "null", "this or messages"),
    _applied(
        "add_special_tokens", Flag(), "true", "of a prompt: the begin token, where the tokenizer file asks for it"
    ),
    _applied("messages", Shaped("as in /v1/chat/completions"), "null", "this or prompt"),
    _applied("add_generation_prompt", Flag(), "true"),
    _applied("continue_final_message", Flag(), "false"),
    _applied("chat_template_kwargs", TEMPLATE_ARGUMENTS, "{}"),
    _applied("return_token_strs", Flag(), "false", "adds token_strs"),
)

DETOKENIZE_FIELDS: tuple[Field, ...] = (
    _applied("model", Text(256), "the served model"),
    _applied("tokens", TokenIds(0, 1 << 20), "required"),
)


def table(endpoint: Endpoint) -> dict[str, Field]:
    return {item.name: item for item in FIELDS if endpoint in item.endpoints}


_TABLES: dict[Endpoint, dict[str, Field]] = {endpoint: table(endpoint) for endpoint in Endpoint}
_STREAM_OPTIONS = {item.name: item for item in STREAM_OPTION_FIELDS}
_SHOWABLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


@dataclass(frozen=True, slots=True)
class CheckedFields:
    """values: parsed values of the applied fields that were given and not null. ignored: showable unknown names."""

    values: dict[str, object]
    ignored: tuple[str, ...] = field(default=())


def check_fields(endpoint: Endpoint, body: Mapping[str, object], *, allow_unknown: bool = False) -> CheckedFields:
    """Every field of a body against the table. Raises ApiError for the first that is wrong."""
    return _check(_TABLES[endpoint], body, prefix="", allow_unknown=allow_unknown)


def check_stream_options(value: object) -> CheckedFields:
    if not isinstance(value, dict):
        raise ApiError(ErrorCode.INVALID_TYPE, "stream_options must be an object.", param="stream_options")
    return _check(_STREAM_OPTIONS, value, prefix="stream_options.", allow_unknown=False)


def check_table(fields: tuple[Field, ...], body: Mapping[str, object]) -> CheckedFields:
    """A body against a table that belongs to no generating endpoint."""
    return _check({item.name: item for item in fields}, body, prefix="", allow_unknown=False)


def _check(
    known: Mapping[str, Field], body: Mapping[str, object], *, prefix: str, allow_unknown: bool
) -> CheckedFields:
    values: dict[str, object] = {}
    ignored: list[str] = []
    for name, value in body.items():
        item = known.get(name)
        if item is None:
            if not allow_unknown:
                raise unknown_field(name, known, prefix)
            if len(ignored) < 8:
                ignored.append(prefix + name if _SHOWABLE.fullmatch(name) else "(unprintable)")
        elif value is not None:
            checked = item.kind.check(prefix + name, value)
            if item.treatment is Treatment.APPLIED:
                values[name] = checked
    return CheckedFields(values, tuple(ignored))


def unknown_field(name: str, known: Mapping[str, object], prefix: str = "") -> ApiError:
    """Names the field only where its name is short and harmless, and the nearest known name if there is one."""
    if not _SHOWABLE.fullmatch(name):
        return ApiError(
            ErrorCode.UNKNOWN_FIELD, f"{prefix or 'The body '}has a field with a name that no field can have."
        )
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    return ApiError(ErrorCode.UNKNOWN_FIELD, f"Unknown field {prefix}{name}.{hint}", param=prefix + name)
