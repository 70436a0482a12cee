"""``headrace serve``: builds the edge around one engine process and runs both until a signal or the engine's end.

This process never imports JAX. What can be wrong in a configuration whatever the device is, is found before the engine
starts: the port is bound, keys and certificates are read, options are held against the model. What depends on the
device, the memory arithmetic above all, is printed when the engine is ready.
"""

import asyncio
import contextlib
import logging
import os
import signal
import ssl
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from starlette.types import ASGIApp

from headrace.model.config import ModelConfig
from headrace.model.config_files import read_config
from headrace.serving.app.build import EngineOptions, check, engine_launch
from headrace.serving.app.bulk_process import bulk_launch
from headrace.serving.app.console import ProgressDisplay, print_configuration, print_ledger
from headrace.serving.app.logs import console_for, set_up_logging
from headrace.serving.app.options import ServeOptions
from headrace.serving.app.readiness import readiness_probe, revision_of
from headrace.serving.app.text_tools import TextOptions, TextTools, load_text_tools
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.probe import ProbeRecord
from headrace.serving.core.request import CancelReason
from headrace.serving.edge.app import build_app
from headrace.serving.edge.bulk_encoder import BulkEncoder
from headrace.serving.edge.engine_client import EngineClient, EngineStartError
from headrace.serving.edge.keys import KeyRing
from headrace.serving.edge.page import page_route
from headrace.serving.edge.probe import ProbeConfig, ReadinessProbe
from headrace.serving.edge.probe_files import read_records, shipped_records
from headrace.serving.edge.security import Doorkeeper, SecurityLayer, SecurityPolicy
from headrace.serving.edge.server import ExitCode, ServerConfig, ServerControl, bind, run, serve, url_of
from headrace.serving.edge.service import Service, ServiceConfig
from headrace.serving.edge.session import SessionConfig
from headrace.serving.edge.shared_prefixes import DeclaredPrefix, SharedPrefixes
from headrace.serving.edge.stream_endpoint import StreamConfig, StreamEndpoint
from headrace.serving.edge.tenants import Policies
from headrace.serving.edge.trace_context import TraceHeaders
from headrace.serving.edge.tracing import TracedService, TraceSink
from headrace.serving.engine.journal_file import open_journal
from headrace.serving.engine.lifecycle import EngineState
from headrace.serving.engine.messages import Starting

log = logging.getLogger("headrace.serve")


class RunningRequests:
    """All requests in the engine, whichever door they came by, as a ``Drainable`` of serving/edge/server.py."""

    def __init__(self, service: Service, engine: EngineClient) -> None:
        self._service = service
        self._engine = engine

    def begin_drain(self, limit_s: float) -> None:
        self._service.drain()

    async def wait_idle(self) -> None:
        await self._engine.wait_idle()

    def abort(self) -> int:
        return self._engine.cancel_all(CancelReason.SHUTDOWN)


def run_server(options: ServeOptions, console: Console) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError and ModelFileError before anything is started."""
    set_up_logging(options.engine.log_format, "edge")
    console = console_for(options.engine.log_format, console)
    model = read_config(options.model_path)
    check(options.engine, model)
    print_configuration(console, options, model)
    keys = None if options.api_keys is None else KeyRing(options.api_keys)
    policies, prefixes = options.limits.read_policies(keys), options.limits.read_prefixes()
    _check_journal(options.engine)
    policy = SecurityPolicy(
        bind_host=options.host,
        allow_hosts=options.allow_hosts,
        allow_origins=options.allow_origins,
        keys=keys,
    )
    _check_certificate(options)
    records = read_records(options.probes)
    with contextlib.ExitStack() as stack:
        tracer = None
        if options.otlp_endpoint is not None:
            from headrace.serving.app.otel import open_tracer

            tracer = stack.enter_context(contextlib.closing(open_tracer(options.otlp_endpoint)))
        return run(_run(options, model, policy, _Files(policies, prefixes, records), console, tracer))


@dataclass(frozen=True, slots=True)
class _Files:
    """What was read from the operator's files before the engine starts."""

    policies: Policies
    prefixes: tuple[DeclaredPrefix, ...]
    records: tuple[ProbeRecord, ...]


async def _run(
    options: ServeOptions,
    model: ModelConfig,
    policy: SecurityPolicy,
    files: _Files,
    console: Console,
    tracer: TraceSink | None,
) -> ExitCode:
    config = ServerConfig(
        host=options.host,
        port=options.port,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        drain_s=options.drain_s,
        ping_interval_s=options.heartbeat_s,
        ping_timeout_s=options.heartbeat_s,
        tcp_user_timeout_s=options.heartbeat_s,
    )
    engine = EngineClient(engine_launch(options.engine), restart=options.restart_engine)
    text = TextOptions(model=str(options.model_path), vocab_size=model.vocab_size, now=datetime.now())
    with bind(config) as listener, contextlib.ExitStack() as stack:
        try:
            tools = await _start(engine, text, model, console)
            if tools is None:
                return ExitCode.CLEAN
            bulk = stack.enter_context(contextlib.closing(BulkEncoder(bulk_launch(text, tools))))
            bulk.start()  # It loads what it needs beside the first requests.
            shared = await asyncio.to_thread(options.limits.encode_prefixes, files.prefixes, tools)
            service = _service(options, model, engine, tools, bulk, files.policies, shared, tracer)
            probe = readiness_probe(_probe_config(options, files.records), service, engine, model.vocab_size)
            log.info("contract %s, numerics %s", *service.contract_hashes)
            app, streams = _application(service, policy, options.heartbeat_s)
            control = ServerControl()
            watchers = (
                asyncio.create_task(_announce(control, probe, options.model_name, url_of(config, listener))),
                asyncio.create_task(_stop_with(engine, control)),
                asyncio.create_task(probe.run(), name="probe"),
            )
            drains = (probe, streams, RunningRequests(service, engine))
            try:
                await serve(app, config, drains, listener=listener, control=control)
                # A signal may end the server between the engine's loss and its burial.
                if engine.state is EngineState.DEAD and not options.restart_engine:
                    control.ends_with(ExitCode.ENGINE_DIED)
                return control.exit_code
            finally:
                for watcher in watchers:
                    watcher.cancel()
                service.close()
        except EngineStartError as error:
            log.error("the engine did not start: %s", error)
            return ExitCode.START_FAILED
        finally:
            await engine.stop()


async def _start(engine: EngineClient, text: TextOptions, model: ModelConfig, console: Console) -> TextTools | None:
    """Start the engine and load the tokenizer meanwhile. None when a signal came first. Raises EngineStartError."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    with ProgressDisplay(console) as display:
        engine.on_progress(lambda sign: _show(display, sign))
        await engine.start()
        starting = asyncio.gather(asyncio.to_thread(load_text_tools, text), engine.wait_ready())
        stopped = asyncio.create_task(signalled.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return None
    tools, _ = await starting
    if engine.ready_info is not None:
        print_ledger(console, model, engine.ready_info)
    return tools


def _show(display: ProgressDisplay, sign: Starting) -> None:
    display.update(sign.what, sign.done, sign.total)


def _service(
    options: ServeOptions,
    model: ModelConfig,
    engine: EngineClient,
    tools: TextTools,
    bulk: BulkEncoder,
    policies: Policies,
    shared: SharedPrefixes,
    tracer: TraceSink | None,
) -> Service:
    limits = options.limits
    config = ServiceConfig(
        model_names=(options.model_name,),
        vocab_size=model.vocab_size,
        eos_ids=tuple(sorted({*model.eos_ids, *tools.tokenizer.eos_ids})),
        version=version("headrace"),
        max_queued_requests=options.engine.max_queued_requests,
        max_queued_prompt_tokens=options.engine.max_queued_prompt_tokens,
        max_streams=limits.max_live_streams,
        max_tokens_in_flight=limits.max_tokens_in_flight,
        max_live_pages=limits.max_live_pages,
        first_token_ms=limits.first_token_ms,
        chunk_tokens=options.engine.chunk_tokens,
        allow_unknown_fields=options.allow_unknown_fields,
        revision=revision_of(options.model_path),
    )
    make = Service if tracer is None else partial(TracedService, sink=tracer)
    return make(
        config,
        engine=engine,
        tokenizer=tools.tokenizer,
        template=tools.template,
        bulk=bulk,
        policies=policies,
        shared_prefixes=shared,
    )


def _probe_config(options: ServeOptions, records: tuple[ProbeRecord, ...]) -> ProbeConfig:
    return ProbeConfig(
        given=records,
        shipped=shipped_records(),
        is_required=options.require_probe,
        interval_s=options.probe_interval_s,
        limit_s=options.probe_limit_s,
    )


def _application(service: Service, policy: SecurityPolicy, heartbeat_s: float) -> tuple[ASGIApp, StreamEndpoint]:
    """One doorkeeper looks at every request, and at the key of a hello."""
    door, is_traced = Doorkeeper(policy), isinstance(service, TracedService)
    session = SessionConfig(server=f"headrace/{version('headrace')}", heartbeat_s=heartbeat_s)
    streams = StreamEndpoint(service, door, StreamConfig(session=session), metrics=service.metrics)
    app = build_app(
        service,
        security=lambda inner: SecurityLayer(TraceHeaders(inner) if is_traced else inner, door),
        stream_endpoint=streams,
        extra_routes=(page_route(),),
    )
    return app, streams


async def _announce(control: ServerControl, probe: ReadinessProbe, name: str, url: str) -> None:
    """The one line on standard output, when the server takes requests. It never comes after a probe that failed."""
    await control.listening.wait()
    if await probe.wait_judged() is not None:
        log.error("listening at %s, where /readyz says what keeps the server from being ready", url)
        return
    click.echo(f"Headrace serves {name} at {url}")


async def _stop_with(engine: EngineClient, control: ServerControl) -> None:
    """End the server when the engine is dead for good."""
    await engine.wait_failed()
    control.stop(ExitCode.ENGINE_DIED)


def _check_journal(engine: EngineOptions) -> None:
    """Raises: ConfigError."""
    if engine.journal is not None:
        os.close(open_journal(Path(engine.journal.path)))
        log.warning("%s will hold the token ids of all prompts and answers; keep it private", engine.journal.path)


def _check_certificate(options: ServeOptions) -> None:
    if options.tls_cert is None or options.tls_key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.tls_cert, options.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key} do not work: {error}"
        ) from None
