"""A Jinja environment for chat templates out of model files, which are not trusted.

Jinja's sandbox keeps a template from Python objects, but bounds neither its work nor its memory. Here every loop
iteration, call, filter, assignment and output is counted and timed, and whatever is kept or shown is weighed with all
that it holds. Operations whose result can be far larger than their operands are estimated before they run.

Filters and globals are those of transformers: ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``,
``break`` and ``continue``, and ``{% generation %}``, which marks the assistant's text for training and is transparent.
"""

import functools
import json
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
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.model.template_growth import TooLarge, estimate_binop, estimate_filter, estimate_method

_MAX_ITEMS = 1_000_000
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
_REMOVED_FILTERS = ("wordwrap", "urlize", "xmlattr", "pprint")
"""Their output can be many times their input, and chat templates have no use for them."""


class BudgetExceeded(TemplateError):
    """The template did more than its limits allow."""


class RaisedByTemplate(TemplateError):
    """The template called ``raise_exception``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Bounds of one rendering. A 5,000-message chat in SmolLM2's template takes 65,000 steps. max_seconds: of CPU time,
    since a thread that others keep from running does no harm."""

    max_steps: int = 2_000_000
    max_chars: int = 16_000_000
    max_seconds: float = 5.0


class _Budget(threading.local):
    """What the rendering in this thread may still do."""

    limits = RenderLimits()
    steps_left = 0
    deadline = 0.0

    def start(self, limits: RenderLimits) -> None:
        self.limits = limits
        self.steps_left = limits.max_steps
        self.deadline = time.thread_time() + limits.max_seconds

    def spend(self, steps: int = 1) -> None:
        before, self.steps_left = self.steps_left, self.steps_left - steps
        if self.steps_left < 0:
            raise BudgetExceeded(f"it took more than {self.limits.max_steps} steps")
        if before >> 6 != self.steps_left >> 6 and time.thread_time() > self.deadline:
            raise BudgetExceeded(f"it took more than {self.limits.max_seconds} s of CPU time")

    def weigh(self, value: Any) -> Any:
        """Bound the text and the items in a value. What occurs twice counts twice, as it will when it is shown."""
        if isinstance(value, str):
            self.spend()
            self.check_length(len(value))
            return value
        stack, num_items, num_chars = [value], 0, 0
        while stack:
            item = stack.pop()
            num_items += 1
            if isinstance(item, str):
                num_chars += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, list | tuple):
                stack.extend(item)
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
            if num_items + len(stack) > _MAX_ITEMS:
                raise BudgetExceeded(f"it made a list of more than {_MAX_ITEMS} items")
            self.check_length(num_chars)
        self.spend(num_items)
        return value

    def check_length(self, num_chars: int) -> None:
        if num_chars > self.limits.max_chars:
            raise BudgetExceeded(f"it made a text of more than {self.limits.max_chars} characters")

    def allow(self, estimate: int) -> None:
        """Let an operation run whose result has about this many characters."""
        self.spend()
        self.check_length(estimate)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders; one may be used by many threads."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self) -> None:
        self.budget = _Budget()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # The optimizer evaluates constant expressions before there is a budget.
            finalize=self.budget.weigh,
            extensions=[_Generation, LoopControlExtension],
        )
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"_each": self._each, "_kept": self.budget.weigh, "_joined": self._joined}

    def load(self, source: str) -> tuple[Template, frozenset[str]]:
        """Compile a template. Returns it, and the names of the variables that it reads.

        Raises: TemplateError, or any other Exception that the Python compiler has for deep or strange nesting.
        """
        tree = self.parse(source)
        variables = frozenset(meta.find_undeclared_variables(tree))
        bounded = _Bounding().visit(tree)
        bounded.set_environment(self)
        return Template.from_code(self, self.compile(bounded), self.make_globals(None)), variables

    def render(self, template: Template, variables: Mapping[str, Any], limits: RenderLimits) -> str:
        """Render within the limits. Raises: TemplateError, or whatever Python raises in the template."""
        self.budget.start(limits)
        parts, length = [], 0
        for part in template.generate(variables):
            length += len(part)
            self.budget.allow(length)
            parts.append(part)
        return "".join(parts)

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.spend()
            yield item

    def _joined(self, parts: list[Any]) -> str:
        self.budget.weigh(parts)
        return "".join(map(str, parts))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Jinja's mark on the function says whether something comes before the value; wraps() copies it.
        offset = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name == "join" and not isinstance(args[offset], str):
                args = (*args[:offset], list(self._each(args[offset])), *args[offset + 1 :])
            if name in ("join", "tojson", "string"):
                self.budget.weigh(args[offset])
            self._allow(estimate_filter, name, args[offset:], kwargs)
            return self.budget.weigh(function(*args, **kwargs))

        return bounded

    def _allow(self, estimate: Callable[..., int], *operation: Any) -> None:
        try:
            self.budget.allow(estimate(*operation))
        except TooLarge as error:
            raise BudgetExceeded(str(error)) from None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self = __self
        self.budget.weigh([args, kwargs])
        method = getattr(__obj, "__wrapped__", __obj)  # The sandbox wraps str.format.
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            self._allow(estimate_method, owner, getattr(method, "__name__", ""), args, kwargs)
        if isinstance(__obj, LoopContext) and args:
            args = (self._each(args[0]), *args[1:])
        return self.budget.weigh(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            # Most of what templates do; as below, without asking which operation on what it is.
            self.budget.check_length(len(left) + len(right))
            self.budget.spend(2)
            return left + right
        self._allow(estimate_binop, operator, left, right)
        return self.budget.weigh(super().call_binop(context, operator, left, right))


class _Bounding(NodeTransformer):
    """Puts the counting filters into a template: around what is looped over, what is kept, and what is joined."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_each")
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = _filtered(node.node, "_kept")
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_kept", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``: the body, as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)  # Jinja declares the place of an expression as any node.
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


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
