"""What the hosts of one engine say to each other: rank 0 leads, every other rank follows.

The frames of ``link.py`` over TCP, for a private network: nobody proves who he is, and nothing is encrypted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headrace.serving.core.plan import StepPlan

MAX_HOSTS = 64
MAX_HELLO_BYTES = 1 << 16
"""The largest frame that is taken from somebody who has not been welcomed."""

Facts = Mapping[str, str]
"""What must be the same on every rank, by the name that a person knows it by, such as --mesh."""


class HostsError(RuntimeError):
    """The hosts cannot begin, or go on, together; the text names the rank and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """One host's place among those of an engine.

    num_hosts: 2 to MAX_HOSTS. rank: 0 leads. coordinator: HOST:PORT where rank 0 listens, and no other address.
    join_s: how long ranks wait for each other at the start.
    """

    num_hosts: int
    rank: int
    coordinator: str
    join_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a rank has come to after loading. facts: of its device. model_hash, digests: of its model and, by name, of
    the tensors. num_pages: how many KV pages its devices hold."""

    facts: dict[str, str]
    model_hash: str
    digests: dict[str, str]
    num_pages: int


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A follower's first frame."""

    rank: int
    facts: dict[str, str]


class Beat(msgspec.Struct, tag="beat", frozen=True):
    """A sign of life, in both directions. steps: how many were begun."""

    steps: int = 0


class HasLoaded(msgspec.Struct, tag="loaded", frozen=True):
    loaded: Loaded


class Reached(msgspec.Struct, tag="reached", frozen=True):
    """A follower is at a point that all ranks pass together."""

    point: str


class GaveUp(msgspec.Struct, tag="gave_up", frozen=True):
    """A follower ends; reason holds no prompt text."""

    reason: str


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """All ranks are there. service: HOST:PORT of JAX's coordination service, which rank 0 is about to start."""

    service: str


class Agreed(msgspec.Struct, tag="agreed", frozen=True):
    """All ranks have loaded the same. num_pages: what the host with least memory holds."""

    num_pages: int


class Proceed(msgspec.Struct, tag="proceed", frozen=True):
    """All ranks have reached the point."""

    point: str


class RunStep(msgspec.Struct, tag="step", frozen=True):
    plan: StepPlan


class End(msgspec.Struct, tag="end", frozen=True):
    """Rank 0 ends, and so does whoever hears it. reason: None = it has drained."""

    reason: str | None


ToLeader = Hello | Beat | HasLoaded | Reached | GaveUp
ToFollower = Welcome | Agreed | Proceed | Beat | RunStep | End


def first_difference(leader: Facts, follower: Facts) -> str | None:
    """In words, by name; None where all is the same."""
    for name in sorted(leader.keys() | follower.keys()):
        here, there = leader.get(name, "absent"), follower.get(name, "absent")
        if here != there:
            return f"{name} is {there[:200]}, and {here[:200]} on rank 0"
    return None


def what_differs(leader: Loaded, follower: Loaded) -> str | None:
    """``first_difference`` of all that was loaded; a tensor is named before the hash of the model."""
    ours, theirs = leader.digests, follower.digests
    for name in sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        if name not in theirs:
            return f"only rank 0 has tensor {name}"
        return f"tensor {name} has other bytes" if name in ours else f"rank 0 has no tensor {name}"
    facts = ({"the model's hash": loaded.model_hash, **loaded.facts} for loaded in (leader, follower))
    return first_difference(*facts)


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, or [HOST]:PORT for an IPv6 address. Raises: ValueError saying what is wrong."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is not HOST:PORT; an IPv6 address goes in brackets, such as [::1]:8471")
    if not colon or not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:8471")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
