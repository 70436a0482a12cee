"""The readiness probe of a server, joined to its service and engine."""

import re
from collections.abc import Sequence
from pathlib import Path

from headrace.serving.core.probe import ChatTurn
from headrace.serving.edge.bodies import chat_prompt
from headrace.serving.edge.engine_client import EngineClient
from headrace.serving.edge.probe import ProbeConfig, ReadinessProbe
from headrace.serving.edge.service import Service

_COMMIT = re.compile(r"[0-9a-f]{40}")


def readiness_probe(config: ProbeConfig, service: Service, engine: EngineClient, vocab_size: int) -> ReadinessProbe:
    """The service takes requests only while it passes; its ``run`` is the caller's to start."""

    async def encode(text: str | None, messages: tuple[ChatTurn, ...] | None) -> Sequence[int]:
        if messages is None:
            return await service.preparation.token_ids(None, text)
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        return await service.preparation.token_ids(chat_prompt({"messages": turns}), None)

    probe = ReadinessProbe(
        config,
        engine=engine,
        contract=service.contract_of,
        encode=encode,
        counts=service.metrics,
        vocab_size=vocab_size,
    )
    service.probe = probe
    engine.on_state_change(lambda _: probe.wake())
    return probe


def revision_of(model: Path) -> str | None:
    """The commit of a model that lies in Hugging Face's cache, ``…/snapshots/COMMIT``; None for any other."""
    return model.name if model.parent.name == "snapshots" and _COMMIT.fullmatch(model.name) else None
