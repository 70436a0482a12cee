"""Digests of plans and events: equal where two of them say the same, whatever process made them.

``plan_digest`` covers everything in a plan. ``Renaming`` covers everything but the names that a run happens to give:
two runs that differ only in which pages, slots and ids they got have equal renamed digests.
"""

import hashlib
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any

from headrace.serving.core.events import Event, TokenEvent
from headrace.serving.core.plan import SlotRef, StepPlan

FIELD_DIGEST_BYTES = 4
"""Of a field of a plan and of events, where it only has to say which of them differs."""

Rename = Callable[[str, Any], Any]
"""(name of the field, value) to the value that is hashed."""

RENAMED = frozenset({"step_id", "request_id", "tenant", "cache_namespace"})
"""Fields whose values are names and nothing else; pages and rows are renamed by rules of their own."""


def plan_digest(plan: StepPlan) -> bytes:
    """SHA-256 over every field of a plan, and of all that it holds."""
    return hashlib.sha256(b"".join(_field_hashes(plan))).digest()


def field_digests(plan: StepPlan) -> dict[str, bytes]:
    """FIELD_DIGEST_BYTES for each field of a plan, to say where two plans differ."""
    return both_digests(plan)[1]


def both_digests(plan: StepPlan) -> tuple[bytes, dict[str, bytes]]:
    """``plan_digest`` and ``field_digests`` for the price of one."""
    hashes = _field_hashes(plan)
    by_field = {f.name: h[:FIELD_DIGEST_BYTES] for f, h in zip(fields(plan), hashes, strict=True)}
    return hashlib.sha256(b"".join(hashes)).digest(), by_field


def events_digest(events: Sequence[Event]) -> bytes:
    """FIELD_DIGEST_BYTES over events in order, less logprobs: the scheduler passes those on unread."""
    parts: list[bytes] = []
    tokens = [(e.request_id, e.index, e.token_id) for e in events if isinstance(e, TokenEvent)]
    _encode(tuple(chain.from_iterable(tokens)), parts, None)
    if len(tokens) < len(events):
        _encode(tuple(e if not isinstance(e, TokenEvent) else None for e in events), parts, None)
    return hashlib.sha256(b"".join(parts)).digest()[:FIELD_DIGEST_BYTES]


class Renaming:
    """Names the pages, rows and ids of one run by the order in which its plans first use them.

    A page gets a new name whenever its first token is written, and a slot with each of its tenants: which of them is
    used a second time is chance too. A page that holds a prefix keeps its name, so reuse of one shows. Feed it the
    plans of a run in order, all or those of one tenant.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._names: dict[tuple[str, object], int] = {}
        self._pages: dict[int, int] = {}
        self._host_pages: dict[int, int] = {}
        self._num_names = 0

    def digest(self, plan: StepPlan) -> bytes:
        """SHA-256 of the plan in this run's order of names. Call it once for each plan."""
        parts: list[bytes] = []
        self._host_pages.update({copy.host_page: self._next_name() for copy in plan.swap_out})
        _encode(plan.swap_out, parts, self._rename)  # Before its pages are written anew, as a step has it.
        for page in _written(plan, self._page_size):
            self._pages[page] = self._next_name()
        _encode((replace(plan, swap_out=()),), parts, self._rename)
        return hashlib.sha256(b"".join(parts)).digest()

    def _next_name(self) -> int:
        self._num_names += 1
        return self._num_names

    def _rename(self, field: str, value: Any) -> Any:
        if field == "page_ids":
            return tuple(self._name_in(self._pages, page) for page in value)
        if field == "page":
            return self._name_in(self._pages, value)
        if field == "host_page":
            return self._name_in(self._host_pages, value)
        is_name = field in RENAMED or (field == "slot" and isinstance(value, SlotRef))
        return self._name(field, value) if is_name else value

    def _name_in(self, names: dict[int, int], page: int) -> int:
        """A page that was written before the first plan that this object was given gets its name here."""
        if page not in names:
            names[page] = self._next_name()
        return names[page]

    def _name(self, kind: str, value: object) -> int:
        return self._names.setdefault((kind, value), len(self._names))


def _written(plan: StepPlan, page_size: int) -> Iterator[int]:
    """Pages whose first token this plan writes."""
    for copy in plan.swap_in:
        yield copy.page
    for row in plan.decode:
        if row.position % page_size == 0:
            yield row.page_ids[row.position // page_size]
    for segment in plan.prefill:
        yield from segment.page_ids[-(-segment.start // page_size) :]


def _field_hashes(plan: StepPlan) -> list[bytes]:
    hashes = []
    for field in fields(plan):
        parts: list[bytes] = [field.name.encode()]
        _encode((getattr(plan, field.name),), parts, None)
        hashes.append(hashlib.sha256(b"".join(parts)).digest())
    return hashes


@cache
def _readers(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...] | None:
    """Name and reader of each field of a dataclass; None for other types."""
    return tuple((field.name, attrgetter(field.name)) for field in fields(kind)) if is_dataclass(kind) else None


def _encode(column: tuple[Any, ...], parts: list[bytes], rename: Rename | None) -> None:
    """Append a form of the values that no other values have. Raises TypeError for a type that has none.

    It runs in each step. Rows of one type go field by field, so that nearly all of it is integers in a row, each in
    one call: 16 rows of 16 pages took 45 µs on two busy cores, and 90 value by value.
    """
    parts.append(b"%d:" % len(column))
    if not column:
        return
    if type(column[0]) is int:
        try:
            packed = struct.pack(f"<{len(column)}q", *column)
        except struct.error:
            pass  # Not integers alone, or beyond 64 bits.
        else:
            parts.append(b"q" + packed)
            return
    kinds: set[Hashable] = set(map(type, column))
    kind = kinds.pop()
    if kinds:
        for value in column:
            _encode((value,), parts, rename)
    elif kind is tuple:
        # Flattened with their lengths: page lists are tuples of integers, and a prompt is one.
        parts.append(b"t")
        _encode(tuple(map(len, column)), parts, rename)
        _encode(tuple(chain.from_iterable(column)), parts, rename)
    elif (readers := _readers(kind)) is not None:
        parts.append(b"(%s;" % getattr(kind, "__name__", "").encode())
        for name, read in readers:
            values = map(read, column)
            _encode(tuple(values if rename is None else map(partial(rename, name), values)), parts, rename)
    else:
        parts.extend(map(_scalar, column))


def _scalar(value: Any) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):  # An enumeration's member is its value.
        text = value.encode()
        return b"s%d;" % len(text) + text
    if isinstance(value, bytes):
        return b"b%d;" % len(value) + value
    raise TypeError(f"a {type(value).__name__} has no canonical form")
