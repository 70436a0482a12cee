"""Replicas that are not what was recorded stay not ready and say which part differs; real processes throughout.

The tiny model is recorded on one server. Copies of its directory with another tokenizer, another chat template and one
flipped bit of one weight, and servers with other types and quantizations, are then started with that record. So is one
whose hashes are as recorded and whose answers are not. The default model is started once with the record that ships.
"""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.serving.edge.probe_files import SHIPPED
from scripts import evidence
from tests.live import SMALL, LiveServer

START_LIMIT_S = 900.0
"""A default model that is compiled anew, beside other work."""
STOP_LIMIT_S = 60.0
LOAD_S = 10.0
LOAD_STREAMS = 8
BODY = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


@contextlib.contextmanager
def replica(folder: Path, model: Path, *options: str) -> Iterator[LiveServer]:
    """A server that need not become ready: its port is chosen here, since the line with its URL may never come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"log-{port}"
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(port), *options]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    try:
        yield LiveServer(url=f"http://127.0.0.1:{port}", process=process, log=log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def settled(server: LiveServer) -> dict[str, Any]:
    """``/readyz`` once the engine is up and the probe has come to something."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{server.log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            found: dict[str, Any] = httpx.get(server.url + "/readyz", timeout=5).json()
            if found["engine"] == "ready" and found["probe"] != "pending":
                return found
        time.sleep(0.1)
    raise AssertionError(f"the probe came to nothing in {START_LIMIT_S} s:\n{server.log.read_text()}")


def headrace(*arguments: str) -> tuple[int, str]:
    """Exit code, and standard output and error."""
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def altered(folder: Path, source: Path, name: str, change: Callable[[Path], None]) -> Path:
    copy = folder / name
    shutil.copytree(source, copy)
    change(copy)
    return copy


def other_tokenizer(model: Path) -> None:
    """Two letters change places."""
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))


def other_template(model: Path) -> None:
    file = model / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["chat_template"] = content["chat_template"].replace("<|turn|>", "<|turn|>\n")
    file.write_text(json.dumps(content))


def flipped_weight(model: Path) -> None:
    """The sign of one value in the middle of the file."""
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    at = len(content) // 2 | 1  # little-endian values of two or four bytes that begin at even offsets: a high byte
    content[at] ^= 0x80
    file.write_bytes(content)


def refused(server: LiveServer) -> dict[str, Any]:
    answer = httpx.post(server.url + "/v1/completions", json=BODY, timeout=30)
    code = answer.json()["error"]["code"] if answer.status_code != 200 else None
    return {"status": answer.status_code, "code": code}


def of_another_part(folder: Path, tiny: Path, record: Path) -> list[dict[str, Any]]:
    """One server after the other, each with the record of the one that was trusted."""
    cases: tuple[tuple[str, Path, tuple[str, ...], str, str], ...] = (
        (
            "tokenizer",
            altered(folder, tiny, "tokenizer", other_tokenizer),
            (),
            "tokenizer differs",
            "contract.tokenizer",
        ),
        (
            "template",
            altered(folder, tiny, "template", other_template),
            (),
            "chat template differs",
            "contract.template",
        ),
        ("flipped bit", altered(folder, tiny, "flipped", flipped_weight), (), "weights (hash of", "contract.model"),
        ("int8 weights", tiny, ("--weights", "int8"), "quantization (how weights", "contract.weights"),
        ("bfloat16", tiny, ("--dtype", "bfloat16"), "dtype differs", "contract.dtype"),
        ("int8 pages", tiny, ("--kv-dtype", "int8"), "dtype of KV pages differs", "contract.kv_dtype"),
    )
    rows = []
    for name, model, options, word, part in cases:
        with replica(folder, model, *SMALL, *options, "--probe", str(record)) as server:
            found, refusal = settled(server), refused(server)
            diff = headrace("contract", "--diff", str(record), server.url)
            checked = headrace("probe", "check", server.url, str(record))
            told = [line for line in server.log.read_text().splitlines() if "not ready: probe failed" in line]
        named = [line.partition(":")[0] for line in diff[1].splitlines()]
        rows.append(
            {
                "what": name,
                "reason": found["reason"],
                "differing_parts": named,
                "passed": not found["ready"]
                and found["probe"] == "failed"
                and word in found["reason"]
                and part in named
                and (diff[0], checked[0]) == (1, 1)
                and word in checked[1]
                and refusal == {"status": 503, "code": "not_ready"}
                and len(told) == 1,
            }
        )
    return rows


def in_effect_only(folder: Path, tiny: Path, trusted: Path) -> dict[str, Any]:
    """All hashes are as recorded and the answers are not, as after a fault of memory: the record is that of the model
    with a flipped bit, under the contract of the one without."""
    record = folder / "flipped.json"
    with replica(folder, folder / "flipped", *SMALL) as server:
        unrecorded = settled(server)
        made = headrace("probe", "record", server.url, "-o", str(record))
    forged = json.loads(record.read_text())
    own = json.loads(trusted.read_text())
    record.write_text(json.dumps({**forged, "contract": own["contract"], "fingerprint": own["fingerprint"]}))
    with replica(folder, tiny, *SMALL, "--probe", str(record)) as server:
        found = settled(server)
    good = not found["ready"] and "weights differ in effect" in found["reason"] and made[0] == 0
    return {"what": "answers alone", "reason": found["reason"], "passed": good and unrecorded["ready"]}


def without_a_record(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for options in ((), ("--require-probe",)):
        with replica(folder, folder / "flipped", *SMALL, *options) as server:
            found, answer = settled(server), refused(server)
            document = httpx.get(server.url + "/v1/contract", timeout=5).json()
            metrics = httpx.get(server.url + "/metrics", timeout=5).text
        says = document["probe"]["status"] == "unrecorded" == found["probe"] and 'state="unrecorded"} 1.0' in metrics
        ready = not options
        good = says and found["ready"] is ready and answer["status"] == (200 if ready else 503)
        rows.append({"what": f"no record {' '.join(options)}".strip(), "reason": found["reason"], "passed": good})
    return rows


def after_a_restart(folder: Path, tiny: Path, record: Path) -> dict[str, Any]:
    """The engine is killed: not ready until the new one has passed."""
    options = ("--probe", str(record), "--restart-engine")
    with replica(folder, tiny, *SMALL, *options) as server:
        settled(server)
        server.engine.kill()
        states: list[tuple[bool, str]] = []
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            found = httpx.get(server.url + "/readyz", timeout=5).json()
            states.append((found["ready"], found["probe"]))
            if found["ready"] and found["engine_restarts"] == 1:
                break
            time.sleep(0.02)
        counted = _passed(server)
    good = states[-1] == (True, "passed") and counted == 2 and not any(r and p != "passed" for r, p in states)
    return {"what": "restart", "reason": f"{len(states)} looks, {counted:g} passes", "passed": good}


def under_load(folder: Path, tiny: Path, record: Path) -> dict[str, Any]:
    """More streams than rows, a probe every second: it comes through, and nobody is refused for it."""
    options = ("--probe", str(record), "--probe-interval-seconds", "1")
    with replica(folder, tiny, *SMALL, *options) as server:
        settled(server)
        end_s = time.monotonic() + LOAD_S
        statuses: list[int] = []

        def ask() -> None:
            with httpx.Client(timeout=60) as client:
                while time.monotonic() < end_s:
                    body = {**BODY, "max_tokens": 60, "ignore_eos": True}
                    statuses.append(client.post(server.url + "/v1/completions", json=body).status_code)

        threads = [threading.Thread(target=ask) for _ in range(LOAD_STREAMS)]
        for thread in threads:
            thread.start()
        looks = []
        while time.monotonic() < end_s:
            looks.append(httpx.get(server.url + "/readyz", timeout=5).json()["ready"])
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        counted = _passed(server)
    good = all(looks) and set(statuses) == {200} and counted >= 4
    what = f"load of {LOAD_STREAMS} streams on 4 rows"
    return {"what": what, "reason": f"{counted:g} passes, {len(statuses)} requests", "passed": good}


def _passed(server: LiveServer) -> float:
    """Runs of the probe that passed, as the metrics count them."""
    text = httpx.get(server.url + "/metrics", timeout=5).text
    lines = [line for line in text.splitlines() if "probe_runs_total" in line and 'result="passed"' in line]
    return float(lines[0].split()[-1]) if lines else 0.0


def default_model(folder: Path) -> dict[str, Any]:
    with replica(folder, resolve_model(DEFAULT_MODEL).path, "--require-probe") as server:
        found, answer = settled(server), refused(server)
        document = httpx.get(server.url + "/v1/contract", timeout=5).json()
        checked = headrace("probe", "check", server.url, str(SHIPPED / f"{DEFAULT_MODEL}.json"))
    good = found["ready"] and found["probe"] == "passed" and answer["status"] == 200 and checked[0] == 0
    return {"what": DEFAULT_MODEL, "probe": document["probe"], "fingerprint": document["fingerprint"], "passed": good}


def trusted(folder: Path, tiny: Path, record: Path) -> list[dict[str, Any]]:
    """The server that is recorded, which the shipped record has found to be as it should."""
    with replica(folder, tiny, *SMALL) as server:
        shipped, answer = settled(server), refused(server)
        made = headrace("probe", "record", server.url, "-o", str(record))
        same = headrace("contract", "--diff", server.url, str(record))
        checked = headrace("probe", "check", server.url, str(record))
    good = shipped["probe"] == "passed" and answer["status"] == 200
    return [
        {"what": "shipped record of tiny", "reason": shipped["reason"], "passed": good},
        {"what": "record and check", "reason": made[1], "passed": [made[0], same[0], checked[0]] == [0, 0, 0]},
    ]


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny, record = folder / "tiny", folder / "record.json"
        shutil.copytree(resolve_model("tiny").path, tiny)
        for part in (
            lambda: trusted(folder, tiny, record),
            lambda: of_another_part(folder, tiny, record),
            lambda: [in_effect_only(folder, tiny, record)],
            lambda: without_a_record(folder),
            lambda: [after_a_restart(folder, tiny, record)],
            lambda: [under_load(folder, tiny, record)],
            lambda: [default_model(folder)],
        ):
            found = part()
            for row in found:
                print(json.dumps(row, ensure_ascii=False), flush=True)
            rows += found
            evidence.save(args.out, False, cases=rows)
    return evidence.write(args.out, all(row["passed"] for row in rows), cases=rows)


if __name__ == "__main__":
    raise SystemExit(main())
