"""The engine process: ``python -m headrace.serving.app.engine_process --fd N``, started by the edge alone.

The first frame on the socket holds its EngineOptions. It reports Starting while it loads and compiles, then Ready, and
ends when the link does: with 0 if the edge closed it, else with 1 after a Failed frame. Ctrl-C and SIGTERM are the
edge's to answer (it may want to drain), so they mean nothing here. Of an engine over several hosts this is one rank;
above 0 the command that started it has no clients, and the plans come from rank 0.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version

import msgspec

from headrace.model.errors import ModelFileError
from headrace.serving.app.build import BuiltEngine, build_engine, decode_options
from headrace.serving.app.hosts import find_hosts, run_follower
from headrace.serving.app.logs import LogFormat, set_up_logging
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine.engine import Engine, StepLoop, describe
from headrace.serving.engine.host_follower import Follower
from headrace.serving.engine.host_leader import Leader
from headrace.serving.engine.host_messages import HostsError
from headrace.serving.engine.inbox import Inbox
from headrace.serving.engine.journal_file import JournalFile, JournalOptions
from headrace.serving.engine.journaled import JournaledRunner, JournaledScheduler, header
from headrace.serving.engine.leader_runner import LeaderRunner
from headrace.serving.engine.lifecycle import SystemClock
from headrace.serving.engine.link import EngineLink, LinkClosed, LinkError, decode_to_engine
from headrace.serving.engine.messages import (
    Cancel,
    Drain,
    Failed,
    Probe,
    ProgramInfo,
    Ready,
    Refused,
    Starting,
    Submit,
)
from headrace.serving.engine.ports import CompiledProgram, EngineFailure, Runner

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EDGE_GONE_GRACE_S = 2.0
"""After the edge's end the loop gets so long to finish its step; a compile that runs on is cut off."""
PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    faulthandler.enable()
    set_up_logging(LogFormat.TEXT, "engine")
    logging.getLogger("jax").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description="Engine process of Headrace; started by headrace serve.")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the link")
    link = EngineLink(socket.socket(fileno=parser.parse_args(arguments).fd))
    try:
        return run(link)
    finally:
        link.close()


def run(link: EngineLink) -> int:
    """Serve one edge until it is gone. Exit code."""
    bodies = link.bodies()
    inbox = Inbox()
    hosts: Leader | Follower | None = None
    try:
        first = next(bodies, None)
        if first is None:
            return 0
        options = decode_options(first)
        set_up_logging(options.log_format, "engine")
        threading.Thread(target=read_commands, args=(bodies, inbox, link), daemon=True, name="link-reader").start()
        started_s = time.monotonic()

        def progress(what: str, done: int, total: int) -> None:
            link.send(Starting(what, done, total))

        if options.hosts is not None:
            hosts = find_hosts(options, options.hosts, SystemClock(), link, progress)
        built = build_engine(options, progress, hosts)
        programs = built.runner.warm_up(progress)
        if hosts is not None:
            hosts.meet("warm up", progress)
            hosts.serves()
        # A full collection walks the 190,000 objects of JAX and the model: 0.35 s on two busy cores, a visible gap in
        # every stream. They live as long as the process, so the collector may forget them.
        gc.collect()
        gc.freeze()
        link.send(ready_message(built, programs, time.monotonic() - started_s, hosts))
        _serve(built, options.journal, hosts, inbox, link)
        return 0
    except LinkClosed as error:
        log.info("%s", error)
        if hosts is not None:
            hosts.give_up(f"rank {hosts.rank} was told to end")
        return 0
    except (ConfigError, ModelFileError, HostsError) as error:
        return _fail(link, hosts, str(error))
    except msgspec.MsgspecError as error:
        return _fail(link, hosts, f"unreadable options: {error}")
    except EngineFailure as error:
        log.exception("the engine gives up")
        return _fail(link, hosts, str(error))
    except Exception as error:
        log.exception("the engine gives up")
        return _fail(link, hosts, describe(error))


def _serve(
    built: BuiltEngine,
    journal: JournalOptions | None,
    hosts: Leader | Follower | None,
    inbox: Inbox,
    link: EngineLink,
) -> None:
    """Until the edge, or the command of a rank above 0, closes the link. Raises: EngineFailure, InvariantError."""
    config, clock = built.measured, SystemClock()
    if isinstance(hosts, Follower):
        run_follower(hosts, built.runner, config.max_steps_in_flight, inbox, link)
        return
    runner: Runner = built.runner if hosts is None else LeaderRunner(built.runner, hosts)
    with contextlib.ExitStack() as stack:
        file, scheduler = None, Scheduler(config)
        if journal is not None:
            file = stack.enter_context(contextlib.closing(JournalFile(journal)))
            file.write(header(config, now_s=clock.now_s(), model_hash=built.model_hash))
            runner = timed = JournaledRunner(runner, clock)
            scheduler = JournaledScheduler(config, file, timed, clock)
        loop = StepLoop(scheduler, runner, clock, max_steps_in_flight=config.max_steps_in_flight)
        with contextlib.suppress(LinkClosed):  # It closed while something was sent: an end like any other.
            Engine(loop, clock, inbox, link, file).run()
    if hosts is not None:
        hosts.farewell()


def read_commands(bodies: Iterator[bytes], inbox: Inbox, link: EngineLink) -> None:
    """The reader thread: frames into the inbox, never waiting for the step loop; then the end of the process."""
    try:
        for body in bodies:
            match decode_to_engine(body):
                case Submit(request=request):
                    rejection = inbox.submit(request)
                    if rejection is not None:
                        link.send(Refused(request.request_id, rejection))
                case Cancel(request_id=request_id, reason=reason):
                    inbox.cancel(request_id, reason)
                case Drain():
                    inbox.drain()
                case Probe(nonce=nonce):
                    inbox.probe(nonce)
    except LinkClosed:
        pass
    except LinkError as error:
        log.error("%s", error)
    inbox.close()
    time.sleep(EDGE_GONE_GRACE_S)
    os._exit(EXIT_FAILED)  # the main thread is deep in a compile or a device call, and nobody waits for it


def ready_message(
    built: BuiltEngine, programs: tuple[CompiledProgram, ...], seconds: float, hosts: Leader | Follower | None = None
) -> Ready:
    config = built.resolved.scheduler
    return Ready(
        model_hash=built.model_hash,
        num_pages=config.num_pages,
        page_size=config.page_size,
        num_slots=config.num_slots,
        max_context=config.max_context,
        kv_bytes_per_token=built.resolved.kv_bytes_per_token,
        weights_bytes=built.weights_bytes,
        programs=tuple(
            ProgramInfo(name=p.name, seconds=p.seconds, temp_bytes=p.temp_bytes, from_cache=p.from_cache)
            for p in programs
        ),
        topology=built.topology,
        mesh=built.mesh,
        attention=built.attention,
        activations=built.activations,
        why=built.why,
        scheme=dict(built.scheme),
        scheme_lines=built.scheme_lines,
        dtype=built.dtype,
        weights=built.weights,
        kv_dtype=built.resolved.kv.dtype,
        kv_bytes=built.resolved.kv_bytes,
        memory=built.resolved.memory,
        warmup_seconds=seconds,
        num_lanes=config.num_lanes,
        hosts=1 if hosts is None else hosts.num_hosts,
        rank=0 if hosts is None else hosts.rank,
        family=built.family,
        architecture=built.architecture,
        stored_types=dict(built.stored_types),
        deterministic=config.deterministic,
        num_swap_pages=config.num_swap_pages,
        swap_page_s=built.runner.swap_page_seconds or 0.0,
        numerics=numerics_of(built),
    )


def numerics_of(built: BuiltEngine) -> dict[str, str]:
    """See ``Ready``. The grid is what chunks of a prompt start on; pages are read in blocks of their size."""
    config = built.resolved.scheduler
    return {
        **built.numerics,
        "headrace": version("headrace"),
        "mesh": built.mesh,
        "decode_rows": ",".join(map(str, config.decode_rows)),
        "prefill_tokens": ",".join(map(str, config.prefill_tokens)),
        "chunk_grid": f"{config.chunk_tokens} in blocks of {config.block_tokens}",
        "page_size": str(config.page_size),
    }


def _fail(link: EngineLink, hosts: Leader | Follower | None, message: str) -> int:
    if hosts is not None:
        hosts.give_up(message)
    with contextlib.suppress(LinkClosed):
        link.send(Failed(message))
    return EXIT_FAILED


def _die_with_parent() -> None:
    """Linux: the kernel kills this process with the edge, also where no Python code could run any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # JAX takes a second or more to take itself down, and nothing needs that
