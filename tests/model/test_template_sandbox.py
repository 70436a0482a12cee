"""Templates that are not trusted: the dialect that they may use, and the work and memory that they may not."""

from datetime import datetime
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from headrace.model.template_sandbox import BudgetExceeded, RaisedByTemplate, RenderLimits, TemplateEnvironment

MESSAGES = [{"role": "user", "content": "hi"}]
NOW = datetime(2024, 2, 29, 12, 0)


def render(source: str, **limits: Any) -> str:
    environment = TemplateEnvironment()
    template, _ = environment.load(source)
    variables = {"messages": MESSAGES, "strftime_now": NOW.strftime}
    return environment.render(template, variables, RenderLimits(**limits))


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}{% endfor %}",
    "{% for a in range(10**9) %}{% endfor %}",
    "{{ range(999999999)|list|length }}",
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "{% macro f(s) %}{{ f(s ~ s) }}{% endmacro %}{{ f('x') }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in [0] recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% set ns = namespace(l=[]) %}{% for a in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set s = 'x' * 90000 %}{{ [s, s] }}",
    "{% set s = 'x' * 90000 %}{{ [s, s]|tojson }}",
    "{% set s = 'x' * 90000 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 90000 %}{{ s|replace('x', s) }}",
    "{% set s = 'x' * 90000 %}{{ s.join(s) }}",
    "{% set s = 'x' * 90000 %}{{ s|join(s) }}",
    "{% set s = 'x' * 90000 %}{{ range(9999)|join(s) }}",
    "{% set s = '\n' * 90000 %}{{ s|indent(60) }}",
    "{{ '\t'.expandtabs(999999999999) }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{% set ns = namespace() %}{% set ns.me = ns %}{{ [ns] }}",
    "{{ 'x' * 999999999999 }}", "{{ 999999999999 * 'x' }}", "{{ ['x'] * 99999999 }}", "{{ 10 ** 10 ** 10 }}",
    "{{ 'x'|center(999999999999) }}", "{{ 'x'.ljust(999999999999) }}", "{{ 'x\n'|indent(99999999999) }}",
    "{{ '%999999999999d' % 1 }}", "{{ '{:999999999999}'.format(1) }}", "{{ '%999999999999d'|format(1) }}",
    "{{ lipsum(n=99999) }}", "{{ [1, 2]|tojson(indent=99999999) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_work_or_grow_without_end(source: str) -> None:
    # Jinja's sandbox limits range() itself, by an OverflowError.
    with pytest.raises((BudgetExceeded, OverflowError, RecursionError, UndefinedError)):
        render(source, max_steps=20_000, max_chars=100_000)


def test_time_is_limited_too() -> None:
    with pytest.raises(BudgetExceeded, match=r"more than 0\.05 s"):
        render(BOMBS[1], max_steps=10**12, max_seconds=0.05)


def test_the_budget_is_that_of_one_rendering() -> None:
    environment = TemplateEnvironment()
    template, _ = environment.load("{% for a in range(900) %}{% endfor %}")
    for _ in range(5):
        assert environment.render(template, {}, RenderLimits(max_steps=1000)) == ""


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", SecurityError),
        ("{{ ''.__class__() }}", SecurityError),
        ("{{ messages.append(1) }}", SecurityError),
        ("{{ messages[0].update(a=1) }}", SecurityError),
        ("{{ strftime_now.__self__() }}", SecurityError),
        ("{% include '/etc/passwd' %}", TypeError),
        ("{% import 'os' as os %}{{ os }}", TypeError),
        ("{{ cycler(1) }}", TemplateError),
        ("{{ raise_exception('no such role') }}", RaisedByTemplate),
    ],
)
def test_what_a_template_may_not_do(source: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        render(source)


def test_variables_are_those_that_the_template_reads() -> None:
    source = "{% set a = 1 %}{% for m in messages %}{{ m.role }}{{ a }}{{ thinking }}{{ ''|_joined }}{% endfor %}"
    assert TemplateEnvironment().load(source)[1] == {"messages", "thinking"}


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '<é>'|tojson }}", '"<é>"'),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for x in undefined_name %}x{% endfor %}", ""),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}c", "ahic"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{% set ns = namespace(n=0) %}{% for x in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t | upper %}x{% endset %}{{ t }}", "12X"),
        ("{%- macro m(x) -%}[{{ x }}]{%- endmacro -%}{{ m(1) }}", "[1]"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(',') }}", "hi"),
        ("{{ messages|map(attribute='content')|join('-' * 40) }}{{ ' / '.join('ab') }}", "hia / b"),
        ("{{ 'a b'.split(' ')[-1].strip().upper() }}", "B"),
        ("{{ '%s-%d' % ('a', 3) }}", "a-3"),
    ],
)
def test_the_dialect_is_that_of_transformers(source: str, text: str) -> None:
    assert render(source) == text
