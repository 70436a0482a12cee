"""The families that Headrace serves: a new one is a file here and a line below."""

from headrace.model.families.gpt_oss import GPT_OSS
from headrace.model.families.llama import LLAMA
from headrace.model.families.mixtral import MIXTRAL
from headrace.model.families.qwen2_moe import QWEN2_MOE
from headrace.model.families.qwen3 import QWEN3
from headrace.model.families.qwen3_moe import QWEN3_MOE
from headrace.model.family import Family

FAMILIES: tuple[Family, ...] = (GPT_OSS, LLAMA, MIXTRAL, QWEN2_MOE, QWEN3, QWEN3_MOE)


def family_named(name: str) -> Family:
    """The family with this name; KeyError if there is none."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(name)
