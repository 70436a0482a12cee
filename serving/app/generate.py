"""``headrace generate``: one prompt, the engine in this very process, text as it comes or one JSON object."""

import json
import sys
from dataclasses import dataclass, fields
from typing import Any

from rich.console import Console

from headrace.model.chat_template import ChatTemplateError
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.console import ProgressDisplay
from headrace.serving.app.llm import LLM
from headrace.serving.app.offline import Completion, RequestError
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """system: a message before the prompt; chat only."""

    text: str
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise ConfigError("--system is a message of a chat; add --chat")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise ConfigError("the prompt is not valid UTF-8") from None


def run_generate(
    prompt: Prompt,
    options: EngineOptions,
    parameters: dict[str, Any],
    *,
    as_json: bool,
    console: Console,
) -> int:
    """Exit code: 0, or 1 when the generation failed. parameters: keyword arguments of ``LLM.generate``.

    Raises: ConfigError for everything that the user asked for and cannot have; ModelFileError.
    """
    if "" in parameters["stop"]:
        raise ConfigError("--stop takes a text that is not empty")
    with ProgressDisplay(console) as display:
        rest = {field.name: getattr(options, field.name) for field in fields(options) if field.name != "model"}
        llm = LLM(options.model, progress=display.update, **rest)
    place = f"{llm.topology.device}, mesh {llm.mesh}"
    chosen = f"{place}, {llm.attention} attention, {llm.dtype}, KV {llm.resolved.kv.dtype}"
    console.print(f"{chosen}{f'; {llm.why}' if llm.why else ''}", style="dim", highlight=False)
    on_text = None if as_json else _write
    try:
        if prompt.chat:
            messages = [{"role": "user", "content": prompt.text}]
            if prompt.system is not None:
                messages.insert(0, {"role": "system", "content": prompt.system})
            [completion] = llm.chat(messages, on_text=on_text, **parameters)
        else:
            [completion] = llm.generate(prompt.text, on_text=on_text, **parameters)
    except (RequestError, ChatTemplateError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        print(json.dumps(completion.as_json(), ensure_ascii=False))
    else:
        print()
        console.print(_summary(completion), style="dim", highlight=False)
    return 1 if completion.finish_reason is FinishReason.ERROR else 0


def _write(index: int, text: str) -> None:
    """Hand text to the terminal at once; control characters of a model must not steer it."""
    sys.stdout.write("".join(char for char in text if char.isprintable() or char in "\n\t"))
    sys.stdout.flush()


def _summary(completion: Completion) -> str:
    """Token counts, why it ended, and the engine's own times."""
    usage, times = completion.usage, completion.metrics
    parts = [
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} new tokens",
        f"ended by {completion.finish_reason}",
    ]
    if times.first_token_ms is not None:
        parts.append(f"first token after {times.first_token_ms:.0f} ms")
    if usage.completion_tokens > 1 and times.decode_ms > 0:
        parts.append(f"then {1000 * (usage.completion_tokens - 1) / times.decode_ms:.1f} tokens/s")
    if completion.error is not None:
        parts.append(completion.error)
    return ", ".join(parts)
