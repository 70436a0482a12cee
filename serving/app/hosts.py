"""An engine process as one of several hosts: what they must have in common, how it finds them, what it does there."""

import contextlib
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import version
from types import MappingProxyType

from headrace.model.config import ModelConfig
from headrace.serving.app.build import EngineOptions, mesh_shape
from headrace.serving.engine.host_follower import Follower
from headrace.serving.engine.host_leader import Leader
from headrace.serving.engine.host_messages import HostPlace
from headrace.serving.engine.host_start import join, lead
from headrace.serving.engine.inbox import Inbox
from headrace.serving.engine.link import EngineLink, LinkClosed
from headrace.serving.engine.messages import Failed, Stats
from headrace.serving.engine.ports import Clock, Progress, Runner

EXIT_LOST = 1
_OWN = ("model", "compile_cache", "hosts", "fake", "max_queued_requests", "max_queued_prompt_tokens", "is_shared")
"""Options that may differ: paths of a host, and what rank 0 alone looks at."""
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "num_slots": "--max-streams",
        "kv_bytes": "--kv-memory",
        "swap_bytes": "--swap-memory",
        "aging_s": "--aging-seconds",
    }
)
"""Where the flag is not the field's name."""


def host_facts(options: EngineOptions, place: HostPlace, model: ModelConfig | None) -> dict[str, str]:
    """What must be the same on every host before anything is loaded, by the name that a person knows it by.

    model: None for an engine without one.
    """
    facts = {name: version(name) for name in ("headrace", "jax", "jaxlib")}
    for field in fields(options):
        if field.name not in _OWN:
            flag = _FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
            facts[flag] = str(getattr(options, field.name))
    facts["--mesh"] = str(mesh_shape(options))  # a file of it may lie anywhere
    facts["--hosts"] = str(place.num_hosts)
    for name, value in ({} if model is None else asdict(model)).items():
        facts[f"the model's {name}"] = str(value)
    return facts


def find_hosts(
    options: EngineOptions, place: HostPlace, clock: Clock, link: EngineLink, progress: Progress
) -> Leader | Follower:
    """Wait until all hosts are there; from then on the loss of any of them ends this process.

    Raises: HostsError, ModelFileError or ConfigError.
    """
    model = None
    if options.fake is None:
        from headrace.model.config_files import read_config

        model = read_config(options.model)
    facts = host_facts(options, place, model)
    if place.rank == 0:
        return lead(place, facts, clock, partial(_end_now, link), progress)
    return join(place, facts, clock, partial(_end_now, link), progress)


def run_follower(follower: Follower, runner: Runner, max_steps_in_flight: int, inbox: Inbox, link: EngineLink) -> None:
    """Run the plans of rank 0 until the command closes the link. Raises: EngineFailure."""
    threading.Thread(target=_obey, args=(inbox, follower), daemon=True, name="commands").start()
    follower.follow(runner, max_steps_in_flight, lambda nonce: link.send(Stats(nonce=nonce)))
    follower.give_up(f"rank {follower.rank} was told to end")


def _obey(inbox: Inbox, follower: Follower) -> None:
    while not (commands := inbox.take(wait=True)).closed:
        if commands.probe is not None:
            follower.probe(commands.probe)
    follower.stop()


def _end_now(link: EngineLink, reason: str | None) -> None:
    """From any thread: the main one may hang in a collective, which never ends. reason: None = as rank 0 wants it."""
    with contextlib.suppress(LinkClosed):
        link.send(Failed(reason or "rank 0 has ended", is_wanted=reason is None))
    os._exit(0 if reason is None else EXIT_LOST)
