"""click options whose help is printed in named groups."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

A_FOLDER = click.Path(file_okay=False, path_type=Path)


class SectionOption(click.Option):
    """An option that knows under which heading it is listed."""

    def __init__(self, *args: Any, section: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class SectionCommand(click.Command):
    """A command whose options are listed by section, in the order in which the sections first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                sections.setdefault(getattr(parameter, "section", "Other"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def section(heading: str) -> Callable[..., Callable[[Any], Any]]:
    """An option decorator for one heading; defaults are shown."""

    def option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
        attributes.setdefault("show_default", True)
        return click.option(*names, cls=SectionOption, section=heading, **attributes)

    return option


class ByteSize(click.ParamType):
    """A number of bytes with an optional unit: 2GiB, 800MB, 65536."""

    name = "size"
    UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
        if found is None or found[2] not in self.UNITS:
            self.fail(f"{value!r} is no size; write it like 2GiB, 800MB or 65536", param, ctx)
        return int(float(found[1]) * self.UNITS[found[2]])
