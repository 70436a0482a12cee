"""What a server must answer to fixed prompts, and whether it does: probe records, and their comparison.

A record belongs to one contract. It holds prompts as text, chat or ids, the ids that they become, and for each the
greedy continuation: ids, and the likeliest TOP_WIDTH ids of each step with their logprobs. Ids must be equal, logprobs
within the record's tolerance. A recorded step never is a near tie, so rounding alone cannot change an id.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.serving.core.contract import Contract, Difference, differences

PROBE_FORMAT: Final = "headrace-probe/1"
TOP_WIDTH: Final = 8
MAX_PROMPTS: Final = 32
MAX_STEPS: Final = 64
MAX_PROMPT_TOKENS: Final = 1024
MIN_RECORDED_STEPS: Final = 8
"""Of all prompts together; fewer would prove too little."""
TIE_FACTOR: Final = 4.0
"""Recording stops before a step whose two likeliest ids are closer than so many tolerances: each of the two may move by
one tolerance in the record and by one in the check."""

UNBOUND_PARTS: Final = frozenset(
    {"attention", "cancellation", "deterministic", "format", "max_context", "protocol", "scheduler", "tool_calls"}
)
"""Parts of a contract in which a server may differ from the record that it is held against: they change no greedy id,
or, as another kernel back end does, only the last bits of a logprob, which the tolerance is for."""

TopIds = tuple[tuple[int, float], ...]
"""(id, logprob), sorted downwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePrompt:
    """One prompt and its greedy answer. At most one of text and messages is set; neither: the prompt is ids alone.

    prompt_ids: what text or messages become. ids: 1 to MAX_STEPS generated ids, end ids ignored. top: for each of them.
    """

    name: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    top: tuple[TopIds, ...]
    text: str | None = None
    messages: tuple[ChatTurn, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """tolerance: of each logprob, absolute, above 0. contract, numerics: of the server that was recorded. made: by
    what and from what, for people."""

    format: str
    fingerprint: str
    contract: Mapping[str, object]
    numerics: Mapping[str, object]
    tolerance: float
    prompts: tuple[ProbePrompt, ...]
    made: str = ""


def record_fault(record: ProbeRecord) -> str | None:
    """What makes a record unusable, in words; None where nothing does."""
    if record.format != PROBE_FORMAT:
        return f"format is not {PROBE_FORMAT}"
    try:
        served = Contract(record.contract, record.numerics)
        is_own = (served.fingerprint, bool(served.numerics_hash)) == (record.fingerprint, True)
    except (TypeError, ValueError) as error:
        return f"contract and numerics have no canonical form: {error}"
    if not is_own:
        return "fingerprint is not that of contract: the file was changed by hand"
    if not (math.isfinite(record.tolerance) and record.tolerance > 0):
        return "tolerance must be above 0"
    if not 1 <= len(record.prompts) <= MAX_PROMPTS:
        return f"prompts must be 1 to {MAX_PROMPTS}"
    return next((fault for prompt in record.prompts if (fault := _prompt_fault(prompt)) is not None), None)


def _prompt_fault(prompt: ProbePrompt) -> str | None:
    where = f"prompt {prompt.name[:40]!r}"
    if prompt.text is not None and prompt.messages is not None:
        return f"{where} has text and messages"
    if not 1 <= len(prompt.prompt_ids) <= MAX_PROMPT_TOKENS:
        return f"{where} must have 1 to {MAX_PROMPT_TOKENS} prompt_ids"
    if not 1 <= len(prompt.ids) <= MAX_STEPS or len(prompt.top) != len(prompt.ids):
        return f"{where} must have 1 to {MAX_STEPS} ids, and top for each of them"
    if any(not 1 <= len(step) <= TOP_WIDTH for step in prompt.top):
        return f"{where}: each step of top must have 1 to {TOP_WIDTH} entries"
    if any(not math.isfinite(value) for step in prompt.top for _, value in step):
        return f"{where}: a logprob is not finite"
    if min(min(prompt.prompt_ids), min(prompt.ids), *(i for step in prompt.top for i, _ in step)) < 0:
        return f"{where}: an id is negative"
    return None


def binding_differences(record: ProbeRecord, contract: Contract) -> tuple[Difference, ...]:
    """Parts in which a server must not differ from the record (``here``) and does (``there``)."""
    found = differences(record.contract, contract.parts)
    return tuple(difference for difference in found if difference.part not in UNBOUND_PARTS)


@dataclass(frozen=True, slots=True)
class Choice:
    """record: None where none is for this contract. differs: why the nearest one is not, where one is asked for."""

    record: ProbeRecord | None
    differs: tuple[Difference, ...] = ()
    nearest: ProbeRecord | None = None


def choose(given: Sequence[ProbeRecord], shipped: Sequence[ProbeRecord], contract: Contract) -> Choice:
    """The record that a server is held against.

    Records that the operator gave say what the server must be: when none of them is for its contract, ``differs`` names
    the parts of the nearest one. Shipped records are only looked at when none was given, and one for another contract
    or another kind of device is none: what multiplies float32 in shorter pieces would be off by more than a CPU's
    tolerance. A record of the very fingerprint goes first.
    """
    device = contract.numerics.get("device")
    records = tuple(given) or tuple(record for record in shipped if record.numerics.get("device") == device)
    exact = [record for record in records if record.fingerprint == contract.fingerprint]
    fitting = [record for record in records if not binding_differences(record, contract)]
    if exact or fitting:
        return Choice((exact or fitting)[0])
    if not given:
        return Choice(None)
    nearest = min(given, key=lambda record: len(binding_differences(record, contract)))
    return Choice(None, binding_differences(nearest, contract), nearest)


def differs_text(differs: Sequence[Difference]) -> str:
    """Such as "tokenizer differs (recorded 12ab…, served 34cd…)", one after the other."""
    return "; ".join(f"{d.word} differs (recorded {d.here}, served {d.there})" for d in differs)


def answer_fault(prompt: ProbePrompt, ids: Sequence[int], top: Sequence[TopIds], tolerance: float) -> str | None:
    """How an answer differs from the record: the first step, and what was expected there; None where it does not.

    ids, top: at least as many steps as recorded. A recorded alternative that the answer's list does not reach must lie
    below the end of that list, within the tolerance.
    """
    for step, (wanted, expected) in enumerate(zip(prompt.ids, prompt.top, strict=True)):
        if step >= len(ids) or step >= len(top):
            return f"it ended after {min(len(ids), len(top))} of {len(prompt.ids)} tokens"
        found = dict(top[step])
        if not found or any(not math.isfinite(value) for value in found.values()):
            return f"step {step} has no finite logprobs"
        worst = max(expected, key=lambda item: _distance(item, found))
        distance = _distance(worst, found)
        if ids[step] != wanted:
            return f"ids differ at step {step}: {ids[step]} instead of {wanted} (a logprob there is {distance:.3g} off)"
        if not distance <= tolerance:
            return (
                f"logits differ at step {step}: the logprob of id {worst[0]} is {distance:.3g} from the recorded "
                f"{worst[1]:.5g}, and {tolerance:g} is allowed"
            )
    return None


def _distance(expected: tuple[int, float], found: Mapping[int, float]) -> float:
    token_id, value = expected
    served = found.get(token_id)
    return max(0.0, value - min(found.values())) if served is None else abs(value - served)


def safe_steps(top: Sequence[TopIds], tolerance: float) -> int:
    """How many first steps of an answer can be recorded: those before the first near tie."""
    for step, entries in enumerate(top):
        if len(entries) < 2 or entries[0][1] - entries[1][1] < TIE_FACTOR * tolerance:
            return step
    return len(top)
