"""A Jinja environment for chat templates out of model files, which are not trusted.

Jinja's sandbox keeps a template from Python objects, but bounds neither its work nor its memory. Here every loop
iteration, call, filter and assignment is counted and timed, and what any of them makes is bounded, so that nothing
can grow from step to step.

Filters and globals are those of transformers: ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``,
``break`` and ``continue``, and ``{% generation %}``, which marks the assistant's text for training and is transparent.
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_NUMBER = 1_000_000
"""Largest integer argument of a call, filter or repetition: a width, an indent, a count."""
_MAX_ITEMS = 1_000_000
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
_LARGE_WIDTH = re.compile(r"\d{6}")


class BudgetExceeded(TemplateError):
    """The template did more than its limits allow."""


class RaisedByTemplate(TemplateError):
    """The template called ``raise_exception``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Bounds of one rendering. A 5,000-message chat in SmolLM2's template takes 30,000 steps."""

    max_steps: int = 2_000_000
    max_chars: int = 16_000_000
    max_seconds: float = 5.0


class _Budget(threading.local):
    """What the rendering in this thread may still do."""

    steps_left = 0
    deadline = 0.0
    max_chars = 0
    limits = RenderLimits()

    def start(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.steps_left = limits.max_steps
        self.max_chars = limits.max_chars
        self.deadline = time.monotonic() + limits.max_seconds

    def spend(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise BudgetExceeded(f"it took more than {self.limits.max_steps} steps")
        if self.steps_left % 64 == 0 and time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it took more than {self.limits.max_seconds} s")

    def check(self, value: Any) -> Any:
        """Count a step, and bound what it made."""
        self.spend()
        if isinstance(value, str):
            if len(value) > self.max_chars:
                raise BudgetExceeded(f"it made a text of more than {self.max_chars} characters")
        elif isinstance(value, list | tuple | dict) and len(value) > _MAX_ITEMS:
            raise BudgetExceeded(f"it made a list of more than {_MAX_ITEMS} items")
        return value


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise BudgetExceeded(f"it uses a number beyond {_MAX_NUMBER}")
        if isinstance(value, tuple):
            _check_numbers(value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders; one may be used by many threads."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # The optimizer evaluates constant expressions before there is a budget.
            extensions=[_Generation, LoopControlExtension],
        )
        self.budget = _Budget()
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json
        self.filters = {name: self._guarded(function) for name, function in self.filters.items()}
        self.filters["_each"] = self._each
        self.filters["_kept"] = self._kept

    def load(self, source: str) -> tuple[Template, frozenset[str]]:
        """Compile a template. Returns it, and the names of the variables that it reads.

        Raises: TemplateError, or any other Exception that the Python compiler has for deep or strange nesting.
        """
        tree = self.parse(source)
        variables = frozenset(meta.find_undeclared_variables(tree))
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "_each")
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = _filtered(assignment.node, "_kept")
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, "_kept", [], [], None, None, lineno=block.lineno)
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree), self.make_globals(None)), variables

    def render(self, template: Template, variables: Mapping[str, Any], limits: RenderLimits) -> str:
        """Render within the limits. Raises: TemplateError, or whatever Python raises in the template."""
        self.budget.start(limits)
        parts, length = [], 0
        for part in template.generate(variables):
            self.budget.spend()
            length += len(part)
            if length > limits.max_chars:
                raise BudgetExceeded(f"it made a text of more than {limits.max_chars} characters")
            parts.append(part)
        return "".join(parts)

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.spend()
            yield item

    def _kept(self, value: Any) -> Any:
        for part in value if isinstance(value, tuple) else (value,):
            self.budget.check(part)
        return value

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # Also copies the mark that says which first argument Jinja passes.
        def guarded(*args: Any, **kwargs: Any) -> Any:
            _check_numbers((*args[1:], *kwargs.values()))
            return self.budget.check(function(*args, **kwargs))

        return guarded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        _check_numbers((*args, *kwargs.values()))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str) and getattr(__obj, "__name__", "").startswith("format"):
            _check_format(owner)
        if isinstance(__obj, LoopContext) and args:
            args = (self._each(args[0]), *args[1:])
        return self.budget.check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise BudgetExceeded("it uses the operator **")
        if operator == "*":
            _check_numbers((left, right))
            for times, items in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(items, str | list | tuple):
                    self._check_repeated(times, items)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _check_numbers((right,))
        return self.budget.check(super().call_binop(context, operator, left, right))

    def _check_repeated(self, times: int, items: str | list[Any] | tuple[Any, ...]) -> None:
        if times * len(items) > (self.budget.max_chars if isinstance(items, str) else _MAX_ITEMS):
            raise BudgetExceeded("it repeats a text or list too often")


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: the body, as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)  # Jinja declares the place of an expression as any node.
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _check_format(text: str) -> None:
    if _LARGE_WIDTH.search(text):
        raise BudgetExceeded("it formats with a width of more than five digits")


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
