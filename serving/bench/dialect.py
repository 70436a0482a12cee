"""What kinds of servers understand beside OpenAI's own fields, so that all of them are asked for the same work.

Exact output lengths: ``ignore_eos`` is known to headrace, vLLM, SGLang and llama-server; a server that has only
OpenAI's fields (kind ``openai``) ends its answers where it likes, and refuses what it does not know. Exact prompt
lengths: ids as a prompt, on the completions' door; a chat has text alone, and its template adds tokens that the usage
counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.errors import ConfigError


class Door(StrEnum):
    """Where requests go in: the WebSocket of headrace, ``/v1/completions`` or ``/v1/chat/completions``."""

    NATIVE = "native"
    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """knows_ignore_eos: answers go on to max_tokens where it is asked for. chat_limit: a chat's field for max_tokens.
    ready: path that answers 200 when the server takes requests."""

    knows_ignore_eos: bool = True
    chat_limit: str = "max_tokens"
    ready: str = "/health"

    def body(self, fields: Mapping[str, object], door: Door) -> dict[str, object]:
        """fields: a completion's, as a workload has them. Raises: ConfigError for ids where a door takes text."""
        found = dict(fields)
        if not self.knows_ignore_eos:
            found.pop("ignore_eos", None)
        if door is Door.CHAT:
            prompt = found.pop("prompt")
            if not isinstance(prompt, str):
                raise ConfigError("a chat takes text: give --prompt-words, or ask the completions' door for ids")
            found["messages"] = [{"role": "user", "content": prompt}]
            found[self.chat_limit] = found.pop("max_tokens")
        return found


KINDS: Mapping[str, Dialect] = {
    "any": Dialect(),
    "headrace": Dialect(ready="/readyz"),
    "llama": Dialect(),
    "vllm": Dialect(),
    "sglang": Dialect(),
    "openai": Dialect(knows_ignore_eos=False, chat_limit="max_completion_tokens", ready="/v1/models"),
}
"""By name. any: fields as they are; most servers beside OpenAI's own take them."""


def dialect_of(kind: str) -> Dialect:
    """Raises: ConfigError naming the kinds."""
    if kind not in KINDS:
        raise ConfigError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    return KINDS[kind]
