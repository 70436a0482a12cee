"""Constants of the online softmax (arXiv:1805.02867), the same in every implementation."""

import math

LOWEST = -1e30
"""Start of the running maximum, and score of a key that is not seen. Finite: the difference of two infinities would be
NaN; and so far below every real score that its exponential is 0."""
LOG2_E = math.log2(math.e)
"""Kernels compute powers of two: exp(x) = exp2(x * LOG2_E)."""
