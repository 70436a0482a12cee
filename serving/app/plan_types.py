"""What ``headrace plan`` is asked, what a compiling process answers, and the plan that comes of it. JAX-free."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.app.build import EngineOptions
from headrace.serving.core.kv_memory import DeviceMemory

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Of each request, in tokens; both at least 1."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A mesh on a slice. data: copies of the model, each on a mesh of its own."""

    topology: str
    data: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJob:
    """What one process compiles: one mesh of one kind of chip, for all slices that have it.

    model: a published name or a path. mesh: without its data axis. keep_hlo: folder for the compiled programs' text.
    """

    model: str
    options: EngineOptions
    mesh: str
    places: tuple[Place, ...]
    work: Workload
    keep_hlo: str | None = None


class ExchangeKind(StrEnum):
    """SUM: of activations over devices. DRAW: the three of a greedy draw, of a few bytes. SEND: to the next stage."""

    SUM = "sum"
    DRAW = "draw"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchanges of one kind and size between the same devices in one step. axes: of the mesh. group: how their devices
    lie, as ``links.Group`` says it. size_bytes: of one. link_bytes: of one, on each link between chips, one way.
    seconds: of all."""

    what: ExchangeKind
    axes: tuple[str, ...]
    group: str
    count: int
    size_bytes: float
    link_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Of one device and one step."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    exchanges: tuple[Exchange, ...]
    hbm_s: float
    products_s: float

    @property
    def links_s(self) -> float:
        return sum(exchange.seconds for exchange in self.exchanges)

    @property
    def seconds(self) -> float:
        return max(self.hbm_s, self.products_s) + self.links_s

    @property
    def bound(self) -> str:
        """The largest term."""
        terms = {"memory": self.hbm_s, "products": self.products_s, "links": self.links_s}
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """So many streams on one copy of the model. token_s: between tokens of a stream, chunks of other streams' prompts
    included. first_token_s: of a prompt whose chunks run beside all the other streams."""

    streams: int
    decode: StepCost
    mixed: StepCost
    token_s: float
    first_token_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.streams / self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Bytes of one device. code_bytes: by program; None where the compiler does not say. tokens: of KV that fit.
    layer_kv_bytes: of one layer's pages. seconds, cpu_seconds: of the process that compiled."""

    memory: DeviceMemory
    code_bytes: dict[str, int | None]
    tokens: int
    layer_kv_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def pages(self) -> int:
        """Without the null page."""
        return self.memory.num_pages - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A mesh on a slice. devices: in all; chips: the same in chips. misfit: why it does not fit, or None.

    first_token_s: of a prompt that waits for nobody. points: by number of streams, upwards; none where it does not
    fit.
    """

    topology: str
    mesh: str
    chips: int
    devices: int
    data: int = 1
    misfit: str | None = None
    compiled: Compiled | None = None
    alone: StepCost | None = None
    first_token_s: float | None = None
    points: tuple[Point, ...] = ()

    def tokens_per_s(self, point: Point) -> float:
        """Of all copies."""
        return self.data * point.tokens_per_s

    def tokens_per_s_per_chip(self, point: Point) -> float:
        return self.tokens_per_s(point) / self.chips


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """weights, kv_dtype: what they are stored as; None where no compiler came so far. refusal: what a person did wrong,
    which ends the command; then there are no rows."""

    rows: tuple[PlanRow, ...] = ()
    weights: str | None = None
    kv_dtype: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """left_out: meshes that were not looked at, with the reason."""

    model: str
    weights: str
    kv_dtype: str
    workload: Workload
    rows: tuple[PlanRow, ...]
    left_out: tuple[str, ...] = ()
