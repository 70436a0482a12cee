from dataclasses import replace
from typing import Any

import pytest

from headrace.serving.app.build import EngineOptions, resolve
from headrace.serving.app.simulate_run import Changes, changed_config
from tests.serving.app.test_build import OPTIONS, SMOLLM2


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (Changes(num_slots=4), {"num_slots": 4}),
        (Changes(chunk_tokens=512), {"chunk_tokens": 512}),
        (Changes(inter_token_s=0.25), {"inter_token_ms": 250.0}),
        (Changes(inter_token_s=0.25, chunk_tokens=64), {"inter_token_ms": 250.0, "chunk_tokens": 64}),
    ],
    ids=str,
)
def test_a_changed_server_has_the_programs_that_it_would_be_started_with(
    changes: Changes, options: dict[str, Any]
) -> None:
    started: EngineOptions = replace(OPTIONS, **options)
    found, wanted = changed_config(resolve(OPTIONS, SMOLLM2).scheduler, changes), resolve(started, SMOLLM2).scheduler
    assert found.buckets == wanted.buckets and found.block_tokens == wanted.block_tokens


def test_a_deterministic_server_keeps_one_program_of_each_kind() -> None:
    config = resolve(replace(OPTIONS, deterministic=True), SMOLLM2).scheduler
    assert len(changed_config(config, Changes(num_slots=4, chunk_tokens=64)).buckets) == 2
