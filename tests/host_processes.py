"""Real ``headrace serve`` processes that serve one model together."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from headrace.model.init import init_weights
from headrace.serving.engine.host_start import free_port
from tests.live import LiveServer, child_of, start_server
from tests.model.test_tokenizer_files import byte_level
from tests.model.tiny import TINY, write_hf

CONFIG = replace(TINY, vocab_size=260, width=32, ffn_width=64, max_context=1024, bos_id=None, eos_ids=(257,))
"""One token per byte, and one id more than the tokenizer has, so that four hosts can share them out."""
SEED = 7
SMALL = ("--device", "cpu", "--max-streams", "4", "--context", "1024", "--chunk-tokens", "32", "--pages", "257")


def write_model(directory: Path, seed: int = SEED) -> Path:
    write_hf(directory, CONFIG, init_weights(CONFIG, seed))
    (directory / "tokenizer.json").write_text(json.dumps(byte_level()))
    return directory


@dataclass(frozen=True, kw_only=True)
class Host:
    """A rank without clients. log: what it prints."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def engine(self) -> psutil.Process:
        return child_of(self.process.pid, "engine_process")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    server: LiveServer
    others: list[Host]

    def engine_of(self, rank: int) -> psutil.Process:
        return self.server.engine if rank == 0 else self.others[rank - 1].engine

    def exit_codes(self, limit_s: float = 30.0) -> list[int]:
        """Of all ranks, which must end by themselves."""
        return [self.server.process.wait(limit_s), *(other.process.wait(limit_s) for other in self.others)]

    def kill(self) -> None:
        for process in (self.server.process, *(other.process for other in self.others)):
            end(process)


def options_of(num_hosts: int, mesh: str | None = None) -> tuple[str, ...]:
    """The same for every rank. mesh: None = tensor, with a device on each host."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    shape = f"tensor={num_hosts}" if mesh is None else mesh
    return (*SMALL, "--mesh", shape, "--hosts", str(num_hosts), "--coordinator", address)


def start_host(log: Path, model: Path, rank: int, options: Sequence[str]) -> Host:
    """A rank; the caller ends it. Options of clients, such as the port, count on rank 0 alone."""
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0", *options, "--rank", str(rank)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return Host(process=process, log=log)


@contextmanager
def serving(
    folder: Path,
    model: Path,
    num_hosts: int,
    *more: str,
    mesh: str | None = None,
    ready_timeout_s: float = 240.0,
) -> Iterator[Hosts]:
    """All ranks, ready; whatever still runs in the end is killed."""
    options = (*options_of(num_hosts, mesh), *more)
    others = [start_host(folder / f"rank-{rank}", model, rank, options) for rank in range(1, num_hosts)]
    try:
        name = ("--served-model-name", "tiny")
        server = start_server(
            folder / "rank-0", str(model), *options, *name, "--rank", "0", ready_timeout_s=ready_timeout_s
        )
        hosts = Hosts(server=server, others=others)
        try:
            yield hosts
        finally:
            hosts.kill()
    finally:
        for other in others:
            end(other.process)


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Its children die with it, stopped ones too."""
    if process.poll() is None:
        process.kill()
    process.wait()
