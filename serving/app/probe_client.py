"""What `headrace contract` and `headrace probe` ask of a running server, over its public protocol."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.exceptions import WebSocketException

from headrace.serving.bench.stream_client import History, StreamClient
from headrace.serving.bench.targets import base_of
from headrace.serving.core.contract import Contract
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.probe import (
    MIN_RECORDED_STEPS,
    PROBE_FORMAT,
    TOP_WIDTH,
    ChatTurn,
    ProbePrompt,
    ProbeRecord,
    TopIds,
    answer_fault,
    binding_differences,
    differs_text,
    safe_steps,
)

ANSWER_LIMIT_S = 300.0
CONNECT_S = 10.0
MAX_DOCUMENT_BYTES = 4 << 20
FLOAT32_TOLERANCE = 1e-3
"""Other shapes and back ends of float32 stay within 2e-4 of each other (check-golden)."""
NARROW_TOLERANCE = 0.1
"""With bfloat16 or 8-bit values: one rounding is 0.4% of a logit."""

TEXTS = (
    ("capital", "The capital of France is"),
    ("code", "def fibonacci(n):\n    if n < 2:\n        return n\n    return"),
    ("cyrillic", "Столица Франции —"),
)
CHAT = (
    ChatTurn(role="system", content="You answer in one short sentence."),
    ChatTurn(role="user", content="Why is the sky blue?"),
)


class ServerError(RuntimeError):
    """The server cannot be asked, or answers with a refusal; the text names URL and remedy."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A server by its URL. key: of the API, None = none. Every method raises: ServerError."""

    url: str
    key: str | None = field(default=None, repr=False)

    @property
    def base(self) -> str:
        return base_of(self.url)

    async def contract(self) -> dict[str, Any]:
        """The document of ``/v1/contract``."""
        found = await self._json("GET", "/v1/contract")
        if not all(isinstance(found.get(name), dict) for name in ("contract", "numerics")):
            raise ServerError(f"{self.base}/v1/contract is not a contract of this version of Headrace")
        return found

    async def prompt_ids(self, text: str | None, messages: Sequence[ChatTurn] | None) -> tuple[int, ...]:
        body: dict[str, Any] = {"prompt": text}
        if messages is not None:
            body = {"messages": [{"role": turn.role, "content": turn.content} for turn in messages]}
        found = await self._json("POST", "/tokenize", body)
        return tuple(found["tokens"])

    async def answers(
        self, prompts: Mapping[str, tuple[tuple[int, ...], int]], *, together: bool
    ) -> dict[str, tuple[tuple[int, ...], tuple[TopIds, ...]]]:
        """Greedy answers of so many tokens to prompts of ids, by name, all at the same time or one after the other."""
        stream_url = "ws" + self.base.removeprefix("http") + "/v1/stream"
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S), StreamClient(stream_url, token=self.key) as client:
                histories: dict[str, History] = {}
                for name, (ids, num_tokens) in prompts.items():
                    histories[name] = await client.create(name, "completion", _greedy(ids, num_tokens))
                    if not together:
                        await histories[name].ended.wait()
                for history in histories.values():
                    await history.ended.wait()
        except TimeoutError:
            raise ServerError(f"{self.base} did not answer the prompts in {ANSWER_LIMIT_S:g} s") from None
        except (OSError, WebSocketException) as error:
            raise ServerError(f"{stream_url} cannot be used: {error}") from None
        return {name: _answer(self.base, history) for name, history in histories.items()}

    async def _json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        url = self.base + path
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        try:
            async with httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(60.0, connect=CONNECT_S)) as client:
                answer = await client.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{url} cannot be reached: {str(error) or type(error).__name__}") from None
        if len(answer.content) > MAX_DOCUMENT_BYTES:
            raise ServerError(f"{url} answers more than {MAX_DOCUMENT_BYTES} bytes")
        try:
            found = answer.json()
        except ValueError:
            found = None
        if answer.status_code != 200 or not isinstance(found, dict):
            raise ServerError(f"{url} answers {answer.status_code}: {_message(found)}")
        return found


def _greedy(ids: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(ids),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP_WIDTH,
        "return_token_ids": True,
    }


def _answer(base: str, history: History) -> tuple[tuple[int, ...], tuple[TopIds, ...]]:
    ends = history.terminals
    if not ends or ends[-1]["type"] != "done":
        why = ends[-1]["error"]["message"] if ends else "the connection was lost"
        raise ServerError(f"{base} refused prompt {history.id!r}: {why}")
    ids: list[int] = []
    top: list[TopIds] = []
    for _, delta in history.of_type("delta"):
        ids += delta["token_ids"]
        top += [tuple((e["token_id"], e["logprob"]) for e in token["top_logprobs"]) for token in delta["logprobs"]]
    return tuple(ids), tuple(top)


def _message(found: object) -> str:
    try:
        return str(found["error"]["message"])  # type: ignore[index]
    except (KeyError, TypeError):
        return "no JSON object"


def default_tolerance(parts: Mapping[str, object]) -> float:
    """Of logprobs, for a server of this contract."""
    is_wide = parts.get("dtype") == parts.get("kv_dtype") == "float32"
    return FLOAT32_TOLERANCE if is_wide else NARROW_TOLERANCE


async def record(server: Probed, *, num_tokens: int, tolerance: float | None) -> ProbeRecord:
    """Ask everything twice, together and one by one, and keep what stands.

    Raises: ServerError, also where the two times differ or too few steps are clear of near ties.
    """
    document = await server.contract()
    contract = Contract(document["contract"], document["numerics"])
    allowed = default_tolerance(contract.parts) if tolerance is None else tolerance
    sources: list[tuple[str, str | None, tuple[ChatTurn, ...] | None]] = [(name, text, None) for name, text in TEXTS]
    if contract.parts.get("template") is not None:
        sources.append(("chat", None, CHAT))
    ids = {name: await server.prompt_ids(text, messages) for name, text, messages in sources}
    wanted = {name: (prompt_ids, num_tokens) for name, prompt_ids in ids.items()}
    first = await server.answers(wanted, together=True)
    second = await server.answers(wanted, together=False)
    prompts = []
    for name, text, messages in sources:
        answer_ids, top = first[name]
        steps = safe_steps(top, allowed)
        if not steps:
            continue
        # A date in a prompt makes other ids tomorrow, so the rendering itself is not held against the record.
        kept = None if document.get("template_shows_date") else messages
        prompt = ProbePrompt(
            name=name, prompt_ids=ids[name], ids=answer_ids[:steps], top=_rounded(top[:steps]), text=text, messages=kept
        )
        if (fault := answer_fault(prompt, *second[name], allowed)) is not None:
            raise ServerError(
                f"{server.base} does not agree with itself on prompt {name!r} ({fault}); give a larger --tolerance, or "
                "look for what is wrong with it"
            )
        prompts.append(prompt)
    if (kept_steps := sum(len(prompt.ids) for prompt in prompts)) < MIN_RECORDED_STEPS:
        raise ServerError(
            f"only {kept_steps} steps of {server.base} are clear of near ties, and {MIN_RECORDED_STEPS} are needed; "
            f"give a smaller --tolerance than {allowed:g}"
        )
    made = f"headrace {document.get('versions', {}).get('headrace', '?')}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    return ProbeRecord(
        format=PROBE_FORMAT,
        fingerprint=contract.fingerprint,
        contract=contract.parts,
        numerics=contract.numerics,
        tolerance=allowed,
        prompts=tuple(prompts),
        made=made,
    )


def _rounded(top: Sequence[TopIds]) -> tuple[TopIds, ...]:
    """Six decimals: finer than any tolerance that makes sense."""
    return tuple(tuple((token_id, round(value, 6)) for token_id, value in step) for step in top)


async def check(server: Probed, wanted: ProbeRecord) -> list[str]:
    """Everything in which a server differs from a record, a line each; empty where nothing does."""
    document = await server.contract()
    contract = Contract(document["contract"], document["numerics"])
    if differs := binding_differences(wanted, contract):
        return [differs_text((difference,)) for difference in differs]
    found = []
    for prompt in wanted.prompts:
        if prompt.text is None and prompt.messages is None:
            continue
        if await server.prompt_ids(prompt.text, prompt.messages) != prompt.prompt_ids:
            part = "tokenizer" if prompt.messages is None else "chat template"
            found.append(f"{part} differs: prompt {prompt.name!r} becomes other ids than recorded")
    asked = {prompt.name: (prompt.prompt_ids, len(prompt.ids)) for prompt in wanted.prompts}
    answers = await server.answers(asked, together=True)
    for prompt in wanted.prompts:
        if (fault := answer_fault(prompt, *answers[prompt.name], wanted.tolerance)) is not None:
            found.append(f"weights differ in effect: prompt {prompt.name!r}: {fault}")
    return found


async def contract_at(source: str, key: str | None) -> Contract:
    """Of a server, or in a file: a saved contract, or a probe record. Raises: ServerError or ConfigError."""
    if "://" in source:
        document: Any = await Probed(source, key).contract()
    else:
        try:
            with open(source, "rb") as file:
                document = json.loads(file.read(MAX_DOCUMENT_BYTES))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source} is neither a URL nor a file of a contract: {error}") from None
    parts = [document.get(name) if isinstance(document, dict) else None for name in ("contract", "numerics")]
    if not all(isinstance(part, dict) for part in parts):
        raise ConfigError(
            f"{source} holds no contract; save what 'headrace contract URL' prints, or give a probe record"
        )
    found = Contract(*parts)
    try:
        _ = found.fingerprint, found.numerics_hash
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source} holds no contract: {error}") from None
    return found
