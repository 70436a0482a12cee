"""The engine without a server: ``from headrace import LLM``. Same scheduler, runner and step loop."""

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, Unpack

from headrace.model.chat_template import load_chat_template
from headrace.model.config_files import read_config
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.model.tokenizer import load_tokenizer
from headrace.serving.app.build import EngineOptions, build_engine
from headrace.serving.app.offline import Completion, OnText, RequestError, complete
from headrace.serving.app.options import default_compile_cache
from headrace.serving.core.admission import Limits, validate
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import TokenLogprobs
from headrace.serving.core.request import Rejection, Request, RequestId, SamplingParams
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.core.text import Detokenizer, OutputText, StopMatcher
from headrace.serving.engine.engine import StepLoop
from headrace.serving.engine.lifecycle import SystemClock
from headrace.serving.engine.messages import Stats
from headrace.serving.engine.ports import CompiledProgram, Progress

Message = Mapping[str, object]

COMPLETION_TOKENS = 16
"""Default length of ``generate``, as of /v1/completions."""


class Parameters(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``chat``: the fields of Ending and of SamplingParams; ranges stand there.

    seed: without one each prompt gets a random one; with one all get it, and the result of a prompt does not depend on
    the others.
    """

    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...] | None
    num_logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """When a generation ends.

    max_tokens: None = as many as the context holds; by default COMPLETION_TOKENS for ``generate``, None for ``chat``.
    stop: strings, not part of the text unless include_stop. ignore_eos: end-of-sequence ids are ordinary ids.
    """

    max_tokens: int | None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False


ENDING_FIELDS = frozenset(field.name for field in fields(Ending))


class LLM:
    """A loaded model, ready to generate. Calls from several threads run one after the other.

    model: a catalogue name (fetched on first use), a .gguf file, a model directory, or a Hugging Face name.
    progress: called while it loads and compiles. options: fields of EngineOptions, such as num_slots, context, pages.
    Raises: PullError, ModelFileError, ConfigError.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **options: Any) -> None:
        report = progress or _ignore
        path = str(resolve_model(model, progress=report).path)
        defaults: dict[str, Any] = {"model": path, "compile_cache": str(default_compile_cache()), "is_shared": False}
        self.options = EngineOptions(**(defaults | options))
        self.config = read_config(path)
        self.tokenizer = load_tokenizer(path, model_vocab_size=self.config.vocab_size)
        self.chat_template = load_chat_template(path)
        built = build_engine(self.options, report)
        self.programs: tuple[CompiledProgram, ...] = built.runner.warm_up(report)
        self.resolved = built.resolved
        self.model_hash = built.model_hash
        self.topology, self.mesh, self.attention = built.topology, built.mesh, built.attention
        self.dtype, self.weights, self.activations, self.why = built.dtype, built.weights, built.activations, built.why
        scheduler = built.resolved.scheduler
        eos_ids = tuple(sorted({*self.config.eos_ids, *self.tokenizer.eos_ids}))
        self._limits = Limits.of(scheduler, vocab_size=self.config.vocab_size, eos_ids=eos_ids)
        self._loop = StepLoop(
            Scheduler(built.measured), built.runner, SystemClock(), max_steps_in_flight=scheduler.max_steps_in_flight
        )
        self._lock = threading.Lock()
        self._num_requests = 0

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        on_text: OnText | None = None,
        **params: Unpack[Parameters],
    ) -> list[Completion]:
        """Complete each prompt; results in their order.

        prompts: a text, texts, or lists of token ids. A text is the whole prompt: control tokens written in it count.
        on_text: called with the index of a prompt and its new text, as it comes.
        Raises: RequestError, naming the prompt, when a prompt or parameter is refused; ValueError; EngineFailure.
        """
        given: Sequence[str | Sequence[int]] = (prompts,) if isinstance(prompts, str) else prompts
        ids = [self._text_ids(p) if isinstance(p, str) else list(p) for p in given]
        return self._complete(ids, COMPLETION_TOKENS, params, on_text)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        on_text: OnText | None = None,
        **params: Unpack[Parameters],
    ) -> list[Completion]:
        """Answer one conversation, or each of several.

        Raises: ChatTemplateError; ConfigError for a model without a chat template; and as ``generate``.
        """
        template = self.chat_template
        if template is None:
            raise ConfigError(f"{self.options.model} has no chat template; use generate with a prompt of your own")
        ids = [template.render_ids(self.tokenizer, [dict(m) for m in talk]) for talk in _conversations(messages)]
        return self._complete(ids, None, params, on_text)

    def score(self, prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Teacher forcing: of each continuation token, its logprob after everything before it, with its rank.

        Takes one request per token; the prefix cache makes all but the first cheap.
        """
        ids = [*prompt_ids, *continuation_ids]
        ending = Ending(max_tokens=1, ignore_eos=True)
        with self._lock:
            requests = [
                self._request(
                    i,
                    ids[: len(prompt_ids) + i],
                    ending,
                    SamplingParams(allowed_token_ids=(token,), num_logprobs=0),
                )
                for i, token in enumerate(continuation_ids)
            ]
            done = complete(self._loop, [(request, self._output_text(ending)) for request in requests])
        return [entry for completion in done for entry in completion.logprobs or ()]

    def stats(self) -> Stats:
        """Counters since construction."""
        return self._loop.stats()

    def _text_ids(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, allow_special=True)
        bos_id = self.tokenizer.bos_id
        return [bos_id, *ids] if self.tokenizer.add_bos and bos_id is not None else ids

    def _complete(
        self, prompts: Sequence[list[int]], max_tokens: int | None, params: Parameters, on_text: OnText | None
    ) -> list[Completion]:
        values: dict[str, Any] = {"max_tokens": max_tokens, "seed": None, **params}
        ending = Ending(**{name: values.pop(name) for name in ENDING_FIELDS & values.keys()})
        if isinstance(ending.stop, str) or not all(ending.stop):
            raise ValueError("stop must be a sequence of strings that are not empty")
        seed = values.pop("seed")
        sampling = [SamplingParams(seed=secrets.randbits(63) if seed is None else seed, **values) for _ in prompts]
        with self._lock:
            work = [
                (self._request(i, ids, ending, sampling[i]), self._output_text(ending)) for i, ids in enumerate(prompts)
            ]
            return complete(self._loop, work, include_stop=ending.include_stop, on_text=on_text)

    def _output_text(self, ending: Ending) -> OutputText:
        return OutputText(
            Detokenizer(self.tokenizer.token_bytes, self.tokenizer.special_ids),
            StopMatcher(ending.stop, ending.include_stop, min_tokens=ending.min_tokens),
        )

    def _request(self, index: int, prompt_ids: list[int], ending: Ending, sampling: SamplingParams) -> Request:
        self._num_requests += 1
        outcome = validate(
            self._limits,
            request_id=RequestId(self._num_requests),
            prompt_ids=prompt_ids,
            sampling=sampling,
            max_tokens=ending.max_tokens,
            min_tokens=ending.min_tokens,
            stop_token_ids=list(ending.stop_token_ids),
            ignore_eos=ending.ignore_eos,
        )
        if isinstance(outcome, Rejection):
            raise RequestError(index, outcome)
        return outcome


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    """One conversation is a list of mappings, several are a list of those."""
    talks: list[Sequence[Message]] = []
    single: list[Message] = []
    for item in messages:
        if isinstance(item, Mapping):
            single.append(item)
        else:
            talks.append(item)
    if single and talks:
        raise TypeError("messages mixes messages and conversations")
    return [single] if single else talks


def _ignore(what: str, done: int, total: int) -> None:
    """The progress of somebody who does not look."""
