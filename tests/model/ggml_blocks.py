"""Random blocks of GGUF's quantized types, with factors that a model could have."""

import gguf
import numpy as np

FLOAT16_AT = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where the float16 factors of a block are."""
READ_ONLY = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types that the gguf package does not write."""


def random_blocks(rng: np.random.Generator, kind: str, count: int, *, size: float = 1e-3) -> np.ndarray:
    """uint8 [count, bytes]; factors are normal with this deviation, all else is any bits."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (count, block_bytes), np.uint8)
    for at in FLOAT16_AT[kind]:
        factors = (rng.standard_normal(count) * size).astype(np.float16)
        blocks[:, at : at + 2] = factors[:, None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(110, 120, count)
    return blocks
