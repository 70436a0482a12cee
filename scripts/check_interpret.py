"""The default model served with the TPU's and the GPU's kernels in Pallas's plain interpreter: golden ids on a CPU.

One prompt of 16 tokens of the golden file and 8 new ones, greedy, weights and KV in float32. The prompt fills a page,
so that the answer is written into a second one. An interpreted kernel runs block by block, which is too slow for
``make test``.
"""

import time
from typing import Any

from headrace import LLM
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from scripts import evidence
from tests.numerics.golden import Reference, references

PROMPT_TOKENS, NEW_TOKENS = 16, 8
OPTIONS: dict[str, Any] = {
    "kv_dtype": "float32",
    "interpret": True,
    "num_slots": 1,
    "page_size": PROMPT_TOKENS,
    "chunk_tokens": PROMPT_TOKENS,
    "context": 4 * PROMPT_TOKENS,
    "compile_cache": None,
}


def golden_prompt() -> Reference:
    """The two best logits of its positions are at least 0.011 apart, 200 times what float32 on a CPU is off."""
    return next(reference for reference in references() if len(reference.prompt_ids) == PROMPT_TOKENS)


def generated(model: str, attention: str, prompt: Reference) -> dict[str, object]:
    """Ids of one engine, and what shows that its kernels ran."""
    start = time.monotonic()
    llm = LLM(model, attention=attention, **OPTIONS)
    ready = time.monotonic()
    [completion] = llm.generate([prompt.prompt_ids], max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0)
    return {
        "attention": llm.attention,
        "ids": list(completion.token_ids),
        "is_golden": completion.token_ids == prompt.ids[:NEW_TOKENS],
        "start_s": round(ready - start, 1),
        "generate_s": round(time.monotonic() - ready, 1),
        "compiles_after_ready": llm.stats().compiles_after_ready,
    }


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--attention", nargs="+", choices=("tpu", "gpu"), default=["tpu", "gpu"])
    args = parser.parse_args()
    model, prompt = str(resolve_model(DEFAULT_MODEL).path), golden_prompt()
    runs = [generated(model, attention, prompt) for attention in args.attention]
    passed = all(
        run["is_golden"] and run["attention"] == f"{attention} interpreted" and run["compiles_after_ready"] == 0
        for run, attention in zip(runs, args.attention, strict=True)
    )
    return evidence.write(args.out, passed, golden_ids=list(prompt.ids[:NEW_TOKENS]), runs=runs)


if __name__ == "__main__":
    raise SystemExit(main())
