"""``headrace serve --rank R`` above 0: an engine without an edge, whose steps come from rank 0.

This process never imports JAX; like the edge it starts the engine process, watches it and outlives it, so that the
reason of an end is told even where the engine could not.
"""

import asyncio
import logging
import signal

from rich.console import Console

from headrace.model.config import ModelConfig
from headrace.model.config_files import read_config
from headrace.serving.app.build import EngineOptions, check, engine_launch
from headrace.serving.app.console import ProgressDisplay, print_follower, print_ledger
from headrace.serving.app.logs import console_for, set_up_logging
from headrace.serving.core.errors import ConfigError
from headrace.serving.edge.engine_client import EngineClient, EngineStartError
from headrace.serving.edge.server import ExitCode, run
from headrace.serving.engine.host_messages import HostPlace

log = logging.getLogger("headrace.serve")


def run_follower(options: EngineOptions, name: str, console: Console) -> int:
    """Follow rank 0 to its end; the exit code. name: of the model. Raises ConfigError and ModelFileError before
    anything is started."""
    set_up_logging(options.log_format, "edge")
    console = console_for(options.log_format, console)
    if options.hosts is None or options.hosts.rank == 0:
        raise ConfigError("--rank must be above 0 for a host without clients")
    model = read_config(options.model)
    check(options, model)
    print_follower(console, options, options.hosts, name, model)
    return run(_run(options, options.hosts, model, console))


async def _run(options: EngineOptions, place: HostPlace, model: ModelConfig, console: Console) -> ExitCode:
    engine = EngineClient(engine_launch(options))
    end_now = asyncio.Event()
    _on_signals(place, engine, end_now)
    ended = asyncio.create_task(_follow(engine, place, model, console))
    asked = asyncio.create_task(end_now.wait())
    await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    was_ready = engine.ready_info is not None
    if end_now.is_set():
        ended.cancel()
    await engine.stop()
    try:
        return await ended
    except asyncio.CancelledError:
        return ExitCode.WORK_LOST if was_ready else ExitCode.CLEAN


async def _follow(engine: EngineClient, place: HostPlace, model: ModelConfig, console: Console) -> ExitCode:
    """Until the engine ends, for whatever reason."""
    try:
        with ProgressDisplay(console) as display:
            engine.on_progress(lambda sign: display.update(sign.what, sign.done, sign.total))
            await engine.start()
            await engine.wait_ready()
    except EngineStartError as error:
        log.error("rank %d did not start: %s", place.rank, error)
        return ExitCode.START_FAILED
    if engine.ready_info is not None:
        print_ledger(console, model, engine.ready_info)
    console.print(f"Rank {place.rank} of {place.num_hosts} follows {place.coordinator}", highlight=False)
    await engine.wait_failed()
    if engine.failure is None:
        log.info("rank 0 has ended, and rank %d with it", place.rank)
        return ExitCode.CLEAN
    log.error("rank %d ends: %s", place.rank, engine.failure)
    return ExitCode.ENGINE_DIED


def _on_signals(place: HostPlace, engine: EngineClient, end_now: asyncio.Event) -> None:
    """Whoever stops all hosts at once wants rank 0 to drain first: in service one signal is not enough."""
    asked = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal asked
        asked += 1
        if engine.ready_info is None or asked > 1:
            end_now.set()
        else:
            log.info("%s: rank %d ends with rank 0, which drains; once more ends it at once", number.name, place.rank)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
