"""What fixes an answer, as a value that can be hashed, compared and pinned.

A contract is a JSON object in one canonical form; the SHA-256 of that form is its fingerprint. It holds contents only:
hashes, names of versions, numbers that a client can notice. Never a path, a host, a time or a number of pages, so that
two replicas that give the same answers have one fingerprint wherever they run. What fixes the last bits of a number
(compiler, instruction set, threads, shapes of programs) is a second object, ``numerics``, with a hash of its own.

The canonical form: keys sorted by code point, no white space, every character beyond ASCII as ``\\uXXXX``, integers
within ±2^53. Floats are refused, since programs print them differently; a number that needs one is a string.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

CONTRACT_FORMAT: Final = "headrace-contract/1"
LOGPROB_SEMANTICS: Final = "raw-logits-float32/1"
"""Log-softmax of the model's own logits in float32, before bias, penalties and temperature; alternatives by value, ties
by lower id; the chosen token is not added to them."""
CANCEL_SEMANTICS: Final = "terminal-with-usage/1"
"""A cancel is answered by the one terminal frame with the true usage; pages are free within two steps."""
MAX_INTEGER: Final = 2**53

Json = Mapping[str, object]

CONTRACT_HASH: Final = "fp_"
NUMERICS_HASH: Final = "nm_"
MAX_EXPECTED: Final = 160
"""Characters of an expectation: room for both hashes, a comma and a space."""
_HASH = re.compile(r"(?:fp_|nm_)[0-9a-f]{64}")

WORDS: Final[Mapping[str, str]] = {
    "model": "weights (hash of the model)",
    "architecture": "architecture (hash of the model's configuration)",
    "template": "chat template",
    "dtype": "dtype",
    "weights": "quantization (how weights lie in memory)",
    "quantization": "quantization (scheme)",
    "kv_dtype": "dtype of KV pages",
    "attention": "kernel back end",
    "activations": "activations (inputs of products with quantized weights)",
    "sampling": "sampling policy",
}
"""What people call a part, where its name does not say it."""


def canonical_json(value: object) -> bytes:
    """The one form that is hashed. Raises: TypeError for a float, a key that is no string, or any other type;
    ValueError for an integer that not every JSON parser reads exactly."""
    _check(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _check(value: object) -> None:
    match value:
        case None | bool() | str():
            return
        case int():
            if abs(value) > MAX_INTEGER:
                raise ValueError("an integer beyond 2^53 has no canonical form; write it as a string")
        case list() | tuple():
            for item in value:
                _check(item)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"a key of type {type(key).__name__} has no canonical form")
                _check(item)
        case _:
            raise TypeError(f"a value of type {type(value).__name__} has no canonical form")


def hash_hex(value: object) -> str:
    """SHA-256 in hex of the canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@dataclass(frozen=True, slots=True)
class Contract:
    """parts: what fixes an answer up to rounding, by name. numerics: what fixes its bits. Both hold what
    ``canonical_json`` takes."""

    parts: Json
    numerics: Json

    @property
    def fingerprint(self) -> str:
        return CONTRACT_HASH + hash_hex(self.parts)

    @property
    def numerics_hash(self) -> str:
        return NUMERICS_HASH + hash_hex(self.numerics)


@dataclass(frozen=True, slots=True)
class Difference:
    """One part that two contracts do not share. Values are shortened for people."""

    part: str
    here: str
    there: str

    @property
    def word(self) -> str:
        return WORDS.get(self.part, self.part)


def differences(here: Json, there: Json) -> tuple[Difference, ...]:
    """Every part that differs, by name; an absent part is shown as "absent"."""
    names = sorted(here.keys() | there.keys())
    return tuple(
        Difference(name, shown(here, name), shown(there, name))
        for name in names
        if name not in here or name not in there or canonical_json(here[name]) != canonical_json(there[name])
    )


def shown(parts: Json, name: str, limit: int = 96) -> str:
    """A part as people read it."""
    if name not in parts:
        return "absent"
    value = parts[name]
    text = value if isinstance(value, str) else canonical_json(value).decode()
    if re.fullmatch(r"[0-9a-f]{64}", text):
        return f"{text[:12]}…"
    return text if len(text) <= limit else f"{text[:limit]}…"


class BadExpectation(ValueError):
    """An expectation that no contract could meet; the text says what it must be and repeats nothing of it."""


def parse_expectation(text: str) -> tuple[str, ...]:
    """Hashes out of ``fp_…``, ``nm_…``, or both with a comma between them. Raises: BadExpectation."""
    names = tuple(part.strip() for part in text.split(","))
    kinds = [name[:3] for name in names]
    if len(text) > MAX_EXPECTED or not all(map(_HASH.fullmatch, names)) or len(set(kinds)) != len(kinds):
        raise BadExpectation(
            "must be the fingerprint of a contract (fp_ and 64 hex digits), the hash of its numerics (nm_ and 64 hex "
            "digits), or both with a comma between them; GET /v1/contract has them"
        )
    return names


def unmet(expected: tuple[str, ...], contract: Contract) -> str | None:
    """Why a contract is not what was expected, with the hash that is served; None where it is."""
    served = {CONTRACT_HASH: contract.fingerprint, NUMERICS_HASH: contract.numerics_hash}
    names = {CONTRACT_HASH: "contract", NUMERICS_HASH: "numerics"}
    wrong = [name[:3] for name in expected if served[name[:3]] != name]
    if not wrong:
        return None
    return " and ".join(f"the {names[kind]} served here is {served[kind]}" for kind in wrong)
