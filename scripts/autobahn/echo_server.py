"""An echo behind the very listener of `headrace serve`, with its limits: what Autobahn's test suite talks to.

Only this script has the echo; no option of the product leads to it.
"""

import asyncio
import signal

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.serving.edge.security import Doorkeeper, SecurityLayer, SecurityPolicy
from headrace.serving.edge.server import ExitCode, ServerConfig, ServerControl, bind, run, serve, url_of


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Every message comes back as it is, text as text and bytes as bytes."""
    assert scope["type"] == "websocket", "the echo has no HTTP"
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message.get("text"), "bytes": message.get("bytes")})


async def main() -> ExitCode:
    """Serve until SIGTERM; the URL goes to standard output when connections are accepted."""
    config = ServerConfig(port=0, drain_s=1.0)
    listener = bind(config)
    control = ServerControl()
    app: ASGIApp = SecurityLayer(echo, Doorkeeper(SecurityPolicy()))
    serving = asyncio.create_task(
        serve(app, config, (), listener=listener, control=control, signals=(signal.SIGTERM, signal.SIGINT))
    )
    await control.listening.wait()
    print("echo at", url_of(config, listener), flush=True)
    return await serving


if __name__ == "__main__":
    raise SystemExit(run(main()))
