"""Rotary frequencies, and how they are stretched for contexts longer than those of the first training. JAX-free."""

import math
from dataclasses import dataclass

import numpy as np

from headrace.serving.core.errors import ConfigError

MAX_FACTOR = 1 << 16
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): slow turns are interpolated, fast ones kept, those between are blended.

    factor: of the context, 1 or more. original_context: positions of the first training. beta_fast, beta_slow: turns in
    it above which a frequency is kept, and below which it is divided by factor; beta_fast > beta_slow > 0. truncate:
    the two borders are rounded outwards to whole frequencies. attention_factor: on cosine and sine; None is
    0.1 ln(factor) + 1.

    Raises: ConfigError, which names the field and its limit.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check(self.factor, self.original_context)
        if not 0 < self.beta_slow < self.beta_fast < MAX_FACTOR:
            raise ConfigError(
                f"rope_scaling beta_fast {self.beta_fast} and beta_slow {self.beta_slow}; "
                f"beta_slow must be above 0, and beta_fast above beta_slow and below {MAX_FACTOR}"
            )
        if self.attention_factor is not None and not 0 < self.attention_factor < MAX_FACTOR:
            raise ConfigError(
                f"rope_scaling attention_factor is {self.attention_factor}; it must be above 0 and below {MAX_FACTOR}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's: wavelengths beyond original_context / low_freq_factor are divided by factor, those below
    original_context / high_freq_factor are kept, those between are blended.

    Raises: ConfigError, which names the field and its limit.
    """

    factor: float
    original_context: int
    low_freq_factor: float
    high_freq_factor: float

    def __post_init__(self) -> None:
        _check(self.factor, self.original_context)
        if not 0 < self.low_freq_factor < self.high_freq_factor < MAX_FACTOR:
            raise ConfigError(
                f"rope_scaling low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                f"the first must be above 0, and the second above it and below {MAX_FACTOR}"
            )


RopeScaling = YarnScaling | Llama3Scaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[np.ndarray, float]:
    """(float32 [H/2] radians per position, factor on cosine and sine). Rounded once, from float64."""
    exponent_H = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain_H = theta**-exponent_H
    if isinstance(scaling, YarnScaling):
        factor = scaling.attention_factor
        factor = 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor
        return _yarn(plain_H, head_dim, theta, scaling).astype(np.float32), factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain_H, scaling).astype(np.float32), 1.0
    return plain_H.astype(np.float32), 1.0


def _yarn(plain_H: np.ndarray, head_dim: int, theta: float, scaling: YarnScaling) -> np.ndarray:
    def index_of(turns: float) -> float:
        """Which frequency makes this many turns over the original context; a fraction between two."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # The reference parts equal borders by a thousandth.
    ramp_H = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    return plain_H / scaling.factor * ramp_H + plain_H * (1 - ramp_H)


def _llama3(plain_H: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns_H = scaling.original_context * plain_H / (2 * math.pi)
    kept_H = (turns_H - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_H = np.clip(kept_H, 0, 1)
    return plain_H / scaling.factor * (1 - kept_H) + plain_H * kept_H


def _check(factor: float, original_context: int) -> None:
    if not 1 <= factor <= MAX_FACTOR:
        raise ConfigError(f"rope_scaling factor is {factor}; it must be from 1 to {MAX_FACTOR}")
    if not 1 <= original_context <= MAX_CONTEXT:
        raise ConfigError(f"rope_scaling original_context is {original_context}; it must be from 1 to {MAX_CONTEXT}")
