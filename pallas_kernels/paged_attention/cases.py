"""Head shapes of real models, with batches that cross every border: page, key block, query block, window, row group."""

from dataclasses import dataclass, replace

from headrace.pallas_kernels.batch_case import BatchCase


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase(BatchCase):
    """window, soft_cap: as in AttentionSpec. q_dtype: of queries and result. kv_dtype: of the pool."""

    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    q_dtype: str = "float32"
    kv_dtype: str = "float32"


SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "page_tokens": 16}
LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_tokens": 32}
GEMMA_3_270M = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "page_tokens": 16}

FLOAT32_CASES = (
    AttentionCase(name="smollm2-135m decode", **SMOLLM2, decode_lens=(1, 15, 16, 17, 63, 64, 65, 200)),
    AttentionCase(name="smollm2-135m one row", **SMOLLM2, decode_lens=(130,)),
    AttentionCase(
        name="smollm2-135m mixed, padding everywhere",
        **SMOLLM2,
        decode_lens=(40, 129, 0, 0, 0),
        segments=((0, 33), (64, 32), (48, 1)),
        padding_blocks=2,
    ),
    AttentionCase(name="llama-3-8b mixed", **LLAMA_8B, decode_lens=(70, 3), segments=((96, 40),), block_tokens=64),
    AttentionCase(name="gemma-3-270m, one key head", **GEMMA_3_270M, decode_lens=(100, 5, 64), segments=((0, 70),)),
    AttentionCase(
        name="qwen3-0.6b prefill, pages longer than a key block",
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        page_tokens=128,
        segments=((0, 130), (128, 128)),
        block_tokens=128,
    ),
    AttentionCase(
        name="shared pages",
        **SMOLLM2,
        decode_lens=(100, 65, 33, 90),
        segments=((64, 40), (32, 16)),
        shared_pages=2,
    ),
    AttentionCase(
        name="window, at its edges",
        **GEMMA_3_270M,
        window=32,
        decode_lens=(1, 31, 32, 33, 34, 47, 48, 49, 160),
        segments=((0, 70), (96, 33)),
    ),
    AttentionCase(name="window of one token", **SMOLLM2, window=1, decode_lens=(1, 16, 17, 200), segments=((64, 33),)),
    AttentionCase(
        name="soft cap and window, as gemma-2",
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        page_tokens=16,
        soft_cap=5.0,
        window=48,
        decode_lens=(20, 90),
        segments=((48, 50),),
    ),
    AttentionCase(
        name="sinks and window, as gpt-oss",
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        page_tokens=16,
        window=128,
        has_sinks=True,
        decode_lens=(1, 129, 0),
        segments=((0, 40), (144, 20)),
    ),
)

QUANTIZED_CASES = tuple(
    replace(case, name=f"{case.name}, {kv_dtype}", kv_dtype=kv_dtype)
    for case in FLOAT32_CASES
    if case.name
    in ("smollm2-135m mixed, padding everywhere", "llama-3-8b mixed", "soft cap and window, as gemma-2", "shared pages")
    for kv_dtype in ("bfloat16", "int8", "float8_e4m3fn", "float8_e5m2")
)

CASES = FLOAT32_CASES + QUANTIZED_CASES
