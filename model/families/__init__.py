"""The families that Headrace serves: a new one is a file here and a line below."""

from headrace.model.families.llama import LLAMA
from headrace.model.family import Family

FAMILIES: tuple[Family, ...] = (LLAMA,)


def family_named(name: str) -> Family:
    """The family with this name; KeyError if there is none."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(name)
