"""The process that encodes long prompts: ``python -m headrace.serving.app.bulk_process --fd N``, started by the edge.

It ends when the edge does. Once it has loaded what it needs it gives up priority, also against processes of other
sessions, which Linux weighs as groups of their own (autogroup).
"""

import argparse
import contextlib
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from headrace.model.errors import ModelFileError
from headrace.serving.app.text_tools import TextOptions, TextTools, load_text_tools
from headrace.serving.edge.bulk_encoder import BulkLaunch, serve_jobs
from headrace.serving.edge.prompt_ids import LocalEncoder

NICE = 10
"""A tenth of the weight of a process at 0, as Linux has it: on a busy core, a tenth of its time."""
AUTOGROUP = Path("/proc/self/autogroup")


def bulk_launch(options: TextOptions, tools: TextTools) -> BulkLaunch:
    """How the edge starts the process. tools: what the edge loaded with these options."""
    return BulkLaunch(
        command=(sys.executable, "-P", "-m", "headrace.serving.app.bulk_process"),
        options=msgspec.msgpack.encode(options),
        content_hash=tools.content_hash,
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="Encodes long prompts for Headrace; started by headrace serve.")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the link")
    with Connection(parser.parse_args(arguments).fd) as connection:
        try:
            tools = load_text_tools(msgspec.msgpack.decode(connection.recv_bytes(), type=TextOptions))
            give_up_priority()
            serve_jobs(connection, LocalEncoder(tools.tokenizer, tools.template), tools.content_hash)
        except (EOFError, ConnectionError):
            pass  # The edge is gone.
        except ModelFileError as error:
            print(f"the process that encodes long prompts: {error}", file=sys.stderr)
            return 1
    return 0


def give_up_priority() -> None:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    with contextlib.suppress(OSError):  # Linux alone has it, and not every kernel.
        AUTOGROUP.write_text(str(NICE))


if __name__ == "__main__":
    raise SystemExit(main())
