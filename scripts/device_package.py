"""The ``headrace`` package from a source tree, on a machine where nothing can be installed.

The folders of the tree have the names of the subpackages, so the root is all that the package's path needs.
"""

import importlib.util
import sys
import types
from pathlib import Path


def provide() -> None:
    """Make ``import headrace.model`` and its siblings work; an installed package stays as it is."""
    if importlib.util.find_spec("headrace") is not None:
        return
    package = types.ModuleType("headrace")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["headrace"] = package
