"""Head shapes of real models, with batches that cross every border: page, key block, query block, group of rows."""

from headrace.pallas_kernels.batch_case import BatchCase

CASES = (
    BatchCase(
        name="smollm2-135m decode",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(1, 15, 16, 17, 63, 64, 65, 200),
    ),
    BatchCase(
        name="smollm2-135m one row",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(130,),
    ),
    BatchCase(
        name="smollm2-135m mixed, padding everywhere",
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        page_tokens=16,
        decode_lens=(40, 129, 0, 0, 0),
        segments=((0, 33), (64, 32), (48, 1)),
        padding_blocks=2,
    ),
    BatchCase(
        name="llama-3-8b mixed",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        page_tokens=32,
        decode_lens=(70, 3),
        segments=((96, 40),),
        block_tokens=64,
    ),
    BatchCase(
        name="gemma-3-270m, one key head",
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        page_tokens=16,
        decode_lens=(100, 5, 64),
        segments=((0, 70),),
    ),
    BatchCase(
        name="qwen3-0.6b prefill, pages longer than a key block",
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        page_tokens=128,
        segments=((0, 130), (128, 128)),
        block_tokens=128,
    ),
)
