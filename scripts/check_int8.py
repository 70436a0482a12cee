"""What int8 weights cost in accuracy: the default model over the prompts of the golden file.

The logprob of every position under the float32 reference's own prefix, and how long greedy ids would stay the
reference's. The file's matrices are of 4 bits in groups of 32 already: int8 for each output channel comes on top.
"""

from typing import Any

import numpy as np

from headrace.model.load import load_model
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.model.specs import WeightScheme
from scripts import evidence
from tests.numerics.forced import ForcedDecoder
from tests.numerics.golden import FLIP_GAP, Reference, references

CHUNK_TOKENS = 256
MAX_MEAN_DIFFERENCE, MAX_NLL_CHANGE = 0.1, 0.02
"""Of logprobs, in nats: mean of absolute differences, and change of the mean."""


def main() -> int:
    args = evidence.arguments(__doc__).parse_args()
    found = compare(str(resolve_model(DEFAULT_MODEL).path), references())
    passed = found["mean_difference"] <= MAX_MEAN_DIFFERENCE and abs(found["nll_change"]) <= MAX_NLL_CHANGE
    return evidence.write(args.out, passed, bounds=[MAX_MEAN_DIFFERENCE, MAX_NLL_CHANGE], **found)


def compare(path: str, prompts: list[Reference]) -> dict[str, Any]:
    model = load_model(path, scheme=WeightScheme.INT8)
    longest = max(len(prompt.prompt_ids) + len(prompt.ids) for prompt in prompts)
    decoder = ForcedDecoder(model, max_tokens=longest, chunk_tokens=CHUNK_TOKENS)
    scores = [decoder.scores(prompt.prompt_ids, prompt.ids) for prompt in prompts]
    logprob = np.array([value for of in scores for value, _ in of])
    right = np.concatenate([prompt.logprobs for prompt in prompts])
    off = np.abs(logprob - right)
    kept = [_kept(is_best for _, is_best in of) for of in scores]
    gaps = [prompt.gaps[count] for prompt, count in zip(prompts, kept, strict=True) if count < len(prompt.gaps)]
    return {
        "prompts": len(prompts),
        "positions": off.size,
        "mean_difference": round(float(off.mean()), 4),
        **{f"p{q}": round(float(np.percentile(off, q)), 4) for q in (50, 90, 99)},
        "max_difference": round(float(off.max()), 3),
        "nll": round(float(-right.mean()), 4),
        "nll_change": round(float(right.mean() - logprob.mean()), 5),
        "positions_with_the_same_best_id": round(float(np.mean([is_best for of in scores for _, is_best in of])), 4),
        "greedy_tokens": len(prompts[0].ids),
        "greedy_same_to_the_end": sum(count == len(prompts[0].ids) for count in kept),
        "greedy_same_for_16": sum(count >= 16 for count in kept),
        "near_ties_among_first_differences": sum(gap < FLIP_GAP for gap in gaps),
        "median_gap_of_first_differences": round(float(np.median(gaps)), 3) if gaps else None,
    }


def _kept(is_best: Any) -> int:
    """Tokens in front of the first that greedy sampling would not take: until there its prefix is the reference's."""
    count = 0
    for best in is_best:
        if not best:
            break
        count += 1
    return count


if __name__ == "__main__":
    raise SystemExit(main())
