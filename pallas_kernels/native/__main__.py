"""Prints which CPU kernels this machine would run, compiling them where need be; or compiles them for a wheel."""

import sys
import time
from pathlib import Path

import click

from headrace.pallas_kernels.native.build import build_into
from headrace.pallas_kernels.native.compiler import BuildError
from headrace.pallas_kernels.native.library import load


def show_progress(done: int, total: int, name: str) -> None:
    print(f"[{done}/{total}] {name}", file=sys.stderr, flush=True)


@click.command(help=__doc__)
@click.option("--cache", type=click.Path(path_type=Path), help="Directory of compiled versions.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Compile for every instruction set of this architecture into this directory, and load nothing.",
)
def main(cache: Path | None, out: Path | None) -> None:
    start_s = time.monotonic()
    try:
        if out is not None:
            version = build_into(out, progress=show_progress)
            path, record, isa = version.path, version.record, "not loaded"
        else:
            library = load(cache=cache, progress=show_progress)
            path, record, isa = library.path, library.record, library.isa
    except BuildError as error:
        raise click.ClickException(str(error)) from None
    print(f"library   {path}")
    print(f"runs      {isa}; compiled for {', '.join(record['isas'])}")
    print(f"compiler  {record['compiler_version']}")
    print(f"flags     {' '.join(record['flags'])}")
    for name, flags in record["isas"].items():
        print(f"  {name:<7} {' '.join(flags)}")
    print(f"seconds   {record['seconds']} to compile, {time.monotonic() - start_s:.2f} now")


if __name__ == "__main__":
    main()
