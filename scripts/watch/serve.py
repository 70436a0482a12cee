"""`headrace serve` whose engine counts the steps from cancels to free pages: the first argument is the file of notes,
the others are those of `headrace serve`.
"""

import dataclasses
import sys
from typing import Any

from headrace.serving import cli
from headrace.serving.app import serve
from headrace.serving.app.build import EngineOptions, engine_launch
from headrace.serving.edge.engine_connection import EngineLaunch


def main() -> int:
    notes = sys.argv.pop(1)

    def watched(options: EngineOptions) -> EngineLaunch:
        command = (sys.executable, "-m", "scripts.watch.engine", "--notes", notes)
        return dataclasses.replace(engine_launch(options), command=command)

    module: Any = serve
    module.engine_launch = watched
    sys.argv.insert(1, "serve")
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
