"""The process behind ``servers.start_fake``: a real ``headrace serve`` in all but its runner.

Its argument is ServeOptions as JSON; no command-line option of the product leads to a fake runner.
"""

import sys
from typing import Any

import msgspec
from rich.console import Console

from headrace.serving.app.options import ServeOptions
from headrace.serving.app.serve import run_server


def main() -> int:
    def convert(kind: type, value: object) -> Any:
        return kind(value)

    return run_server(msgspec.json.decode(sys.argv[1], type=ServeOptions, dec_hook=convert), Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
