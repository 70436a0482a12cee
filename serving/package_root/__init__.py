"""Headrace: an LLM inference server written for XLA.

``from headrace import LLM`` gives the engine without a server. The import is lazy, so that
``headrace --version`` and the edge process never start JAX.
"""

from importlib.metadata import version
from typing import Any

__version__ = version("headrace")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from headrace.serving.app.llm import LLM

        return LLM
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
