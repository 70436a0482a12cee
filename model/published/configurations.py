"""Configurations of published models, for planning without their weights. JAX-free.

Each is the model's own ``config.json``, as facts: what ``config_files.py`` reads. Sources: the repositories below, on
Hugging Face.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from headrace.model.config import ModelConfig
from headrace.model.config_files import config_from_directory
from headrace.model.directory import ModelDirectory

PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
        "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
        "qwen3-8b": "Qwen/Qwen3-8B",
        "qwen3-32b": "Qwen/Qwen3-32B",
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
        "gpt-oss-20b": "openai/gpt-oss-20b",
        "gpt-oss-120b": "openai/gpt-oss-120b",
    }
)
"""Source by name."""


def published_config(name: str) -> ModelConfig:
    """Of one of PUBLISHED."""
    return config_from_directory(ModelDirectory(Path(__file__).parent), f"{name}.json")
