"""One model over two processes with a CPU device each: as the model says it; and a rank that is killed."""

import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from headrace.model.init import init_weights
from headrace.model.oracle import logits_SV
from tests.cases.tiny_model import FLIP_GAP
from tests.host_processes import CONFIG, SEED, serving, write_model

PROMPT = [104, 101, 97, 100, 32, 114, 97, 99, 101]
NOTICE_LIMIT_S = 10.0


def test_two_hosts_answer_as_the_model_says_and_end_when_one_is_killed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with serving(tmp_path, model, 2, "--max-streams", "1") as hosts:
        body = {"model": "tiny", "prompt": PROMPT, "return_token_ids": True, "temperature": 0, "max_tokens": 12}
        answer = httpx.post(f"{hosts.server.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=60).json()
        ids = answer["choices"][0]["token_ids"]
        raw_SV = np.asarray(logits_SV(init_weights(CONFIG, SEED), CONFIG, [*PROMPT, *ids]))[len(PROMPT) - 1 : -1]
        assert len(ids) == 12 and all(raw_V[i] > raw_V.max() - FLIP_GAP for i, raw_V in zip(ids, raw_SV, strict=True))

        client = openai.OpenAI(base_url=f"{hosts.server.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        hosts.engine_of(1).kill()
        killed_s = time.monotonic()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
        assert time.monotonic() - killed_s < NOTICE_LIMIT_S
        assert caught.value.code == "engine_lost"
        assert hosts.exit_codes() == [4, 4]
        assert "rank 1 (127.0.0.1:" in hosts.server.log.read_text()
        assert "2 hosts, of which this is rank 1" in " ".join(hosts.others[0].log.read_text().split())
