"""The letter key: names of arrays end in their axes, such as ``x_TD``, ``q_TNH``, ``page_table_BM``.

The same letters stand in einsum strings, so that name and equation check each other.
"""

from collections.abc import Mapping
from types import MappingProxyType

AXIS_LETTERS: Mapping[str, str] = MappingProxyType(
    {
        "B": "slots: rows of the decode batch",
        "T": "tokens of one step, flat and padded",
        "S": "tokens of one whole sequence (reference code)",
        "D": "width of the residual stream",
        "F": "width of the feed-forward layer",
        "V": "vocabulary",
        "L": "layers",
        "N": "query heads",
        "K": "key and value heads",
        "X": "query heads, flat: N * H",
        "Y": "key and value heads, flat: K * H",
        "G": "query heads of one key head: N / K",
        "H": "width of one head",
        "P": "pages in the pool, page 0 is the null page",
        "W": "tokens of one page",
        "M": "pages of one sequence",
        "E": "experts",
        "A": "experts that a token takes",
    }
)
