"""One model over two processes with two CPU devices: as one process has it; and a rank that is killed."""

import time
from pathlib import Path

import httpx
import openai
import pytest

from headrace import LLM
from tests.host_processes import serving, write_model

PROMPT = [104, 101, 97, 100, 32, 114, 97, 99, 101]
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
DRAWN = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.8, "seed": 5, "ignore_eos": True}
NOTICE_LIMIT_S = 10.0


def ids_of(url: str, body: dict[str, object]) -> list[int]:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "return_token_ids": True, **body},
        timeout=60,
    ).json()
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_two_hosts_answer_as_one_does_and_end_when_one_is_killed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    llm = LLM(str(model), mesh="tensor=2", device="cpu", num_slots=4, context=1024, chunk_tokens=32, pages=257)
    expected = [[list(c.token_ids) for c in llm.generate([PROMPT], **parameters)][0] for parameters in (GREEDY, DRAWN)]
    with serving(tmp_path, model, 2) as hosts:
        assert [ids_of(hosts.server.url, body) for body in (GREEDY, DRAWN)] == expected
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
