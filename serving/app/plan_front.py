"""The Pareto front of a plan: what no other row and number of streams beats in both speed and cost. JAX-free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.serving.app.plan_types import Plan, PlanRow, Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A row with a number of streams. is_best: no other choice has both a shorter time per token and more tokens per
    second and chip, or one of them and the other the same."""

    row: PlanRow
    point: Point
    is_best: bool

    @property
    def token_s(self) -> float:
        """Between tokens of a stream."""
        return self.point.token_s

    @property
    def tokens_per_s_per_chip(self) -> float:
        return self.row.tokens_per_s_per_chip(self.point)

    @property
    def streams(self) -> int:
        """On all copies."""
        return self.row.data * self.point.streams


def choices(plan: Plan) -> tuple[Choice, ...]:
    """Of all rows that fit, fastest first."""
    all_of = [(row, point) for row in plan.rows for point in row.points]
    best = front((point.token_s, row.tokens_per_s_per_chip(point)) for row, point in all_of)
    found = [Choice(row=row, point=point, is_best=is_best) for (row, point), is_best in zip(all_of, best, strict=True)]
    return tuple(sorted(found, key=lambda choice: (choice.token_s, -choice.tokens_per_s_per_chip)))


def front(values: Iterable[tuple[float, float]]) -> Sequence[bool]:
    """For each (less is better, more is better): whether no other beats it. Equal ones beat nobody."""
    values = list(values)
    order = sorted(range(len(values)), key=lambda i: (values[i][0], -values[i][1]))
    best = [False] * len(values)
    most: tuple[float, float] | None = None
    for i in order:
        if most is None or values[i][1] > most[1] or values[i] == most:
            best[i] = True
            most = values[i]
    return best
