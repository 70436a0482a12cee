"""The engine process without a model, for tests: tokens by the rule of fake_runner, and faults on demand."""

import os
import signal
import time
from collections.abc import Callable

from headrace.model.config import ModelConfig
from headrace.serving.app.build import BuiltEngine, EngineOptions, FakeOptions, resolve
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.plan import StepPlan
from headrace.serving.engine.fake_runner import FakeRunner
from headrace.serving.engine.host_messages import Loaded
from headrace.serving.engine.messages import Topology
from headrace.serving.engine.ports import Hosts, Progress

MAX_CONTEXT = 4096


def fake_model(vocab_size: int) -> ModelConfig:
    """Of a size that makes KV arithmetic small."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        num_layers=1,
        width=8,
        ffn_width=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_context=MAX_CONTEXT,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
    )


def build_fake_engine(
    options: EngineOptions, fake: FakeOptions, progress: Progress, hosts: Hosts | None = None
) -> BuiltEngine:
    if fake.fault == "fail_start":
        raise ConfigError("fault fail_start")
    if hosts is not None:
        hosts.agree(Loaded(facts={}, model_hash="fake", digests={"fake": options.model}, num_pages=1), progress)
    resolved = resolve(options, fake_model(fake.vocab_size))
    runner = FakeRunner(
        resolved.scheduler, vocab_size=fake.vocab_size, num_experts=fake.num_experts, on_collect=step_hook(fake)
    )
    return BuiltEngine(
        runner=runner,
        resolved=resolved,
        model_hash="fake",
        weights_bytes=0,
        topology=Topology(platform="fake", device_kind="fake"),
        attention="none",
        dtype="float32",
    )


def step_hook(fake: FakeOptions) -> Callable[[StepPlan], None]:
    """What happens when a step is collected. Raises ConfigError for a fault that is not known."""
    kind, _, number = (fake.fault or "none:0").partition(":")
    if kind not in ("none", "hang", "raise", "raise_always", "exit") or not number.isdecimal():
        raise ConfigError(f"unknown fault {fake.fault!r}")
    first_step = int(number)

    def on_collect(plan: StepPlan) -> None:
        time.sleep(fake.step_ms / 1e3)
        if kind == "hang" and plan.step_id >= first_step:
            while True:
                signal.pause()
        if kind == "exit" and plan.step_id >= first_step:
            os._exit(3)
        if (kind == "raise" and plan.step_id == first_step) or (kind == "raise_always" and plan.step_id >= first_step):
            raise RuntimeError("planted fault")

    return on_collect
