"""How a layer of experts chooses among them and weighs them, and what an expert does between its products. JAX-free."""

import math
from dataclasses import dataclass
from enum import StrEnum

from headrace.serving.core.errors import ConfigError


class RouterScore(StrEnum):
    """What a router makes of its logits.

    SOFTMAX: over all experts, before the choice. SOFTMAX_CHOSEN: over the chosen experts' logits, after it. SIGMOID:
    of each logit by itself.
    """

    SOFTMAX = "softmax"
    SOFTMAX_CHOSEN = "softmax_chosen"
    SIGMOID = "sigmoid"


class RouterBias(StrEnum):
    """Where a router's bias goes: nowhere, into the logits, or onto the scores for the choice only."""

    NONE = "none"
    LOGITS = "logits"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """score, bias: see there. renormalize: the chosen scores are divided by their sum. scale: factor on the result.

    Raises: ConfigError, which names the field and its limit.
    """

    score: RouterScore = RouterScore.SOFTMAX
    bias: RouterBias = RouterBias.NONE
    renormalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ConfigError(f"router scale is {self.scale}; it must be finite and above 0")
        if self.score is RouterScore.SOFTMAX_CHOSEN and (self.renormalize or self.bias is RouterBias.CHOICE):
            raise ConfigError("router score softmax_chosen sums to 1 as it is, and takes its bias into the logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The gated activation: g · sigmoid(alpha · g) · (u + up_offset), with g at most limit and u within ± limit.

    The default is SwiGLU. Raises: ConfigError, which names the field and its limit.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"gate alpha is {self.alpha}; it must be finite and above 0")
        if self.limit is not None and not (math.isfinite(self.limit) and self.limit > 0):
            raise ConfigError(f"gate limit is {self.limit}; it must be finite and above 0")
        if not math.isfinite(self.up_offset):
            raise ConfigError(f"gate up_offset is {self.up_offset}; it must be finite")
