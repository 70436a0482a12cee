"""Errors of model files."""

from os import PathLike, fspath


class ModelFileError(ValueError):
    """A model file that is damaged, hostile or not supported; the text names the file and the reason.

    path: the file (or directory) at fault. reason: what is wrong, the limit, and the remedy where there is one.
    """

    def __init__(self, path: str | PathLike[str], reason: str) -> None:
        self.path = fspath(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")
