"""The two exceptions of the core, and the rule for when to use which.

An expected refusal is a value (``Rejection``) and always reaches the client. ``ConfigError`` is an operator's
mistake found at start. ``InvariantError`` means that the program itself is wrong: the engine fails every stream with
a typed error and the process ends.
"""


class ConfigError(ValueError):
    """A configuration that cannot work; the text names the option, the value, the limit and the remedy."""


class InvariantError(RuntimeError):
    """A broken internal invariant."""
