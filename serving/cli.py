"""Command line of Headrace."""


def main() -> int:
    raise SystemExit("the command line is not built yet")
