"""Worlds that once broke a promise of the scheduler, made small by the shrinker; they run in each gate."""

from headrace.serving.core.config import PreemptionPolicy
from headrace.serving.core.request import Priority, SamplingParams
from headrace.serving.core.simulated_world import Faults, Reader, World

__all__ = ["FOUND", "Faults", "PreemptionPolicy", "Priority", "Reader", "SamplingParams"]

FOUND: tuple[World, ...] = ()
