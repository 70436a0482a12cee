"""What the forms of activations cost in accuracy on the CPU's kernels: the default model over the golden file.

For float32, int16 and int8: greedy ids through the whole engine against those of transformers in float32, and the
logprob of every position under the reference's own prefix, with the share of positions where another id is best.
"""

import gc
from typing import Any

import jax
import numpy as np

from headrace import LLM
from headrace.model.pull import DEFAULT_MODEL, resolve_model
from headrace.pallas_kernels.types import Activations
from headrace.serving.runner.backend import Wishes, choose_backend
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.load import load_placed
from scripts import evidence
from tests.numerics.forced import ForcedDecoder
from tests.numerics.golden import FLIP_GAP, TOLERANCE_OF, Reference, find_flips, references

CHUNK_TOKENS = 256
MAX_CHANGED_SHARE = 0.05
"""Of positions, with int8 activations."""
Json = dict[str, Any]


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a file of it")
    args = parser.parse_args()
    path, prompts = str(resolve_model(args.model).path), references()
    found = {}
    for activations in Activations:
        found[activations.value] = greedy(path, activations, prompts) | forced(path, activations, prompts)
        gc.collect()
    return evidence.write(
        args.out,
        all(is_kept(found[name.value], name) for name in (Activations.EXACT, Activations.INT16))
        and found[Activations.INT8.value]["changed_share"] <= MAX_CHANGED_SHARE,
        bounds={"max_logprob_difference": dict(TOLERANCE_OF), "changed_share_of_int8": MAX_CHANGED_SHARE},
        **found,
    )


def is_kept(found: Json, activations: Activations) -> bool:
    """The ids are the reference's, and its logprobs within the tolerance of these activations."""
    return not found["flips"] and found["logprob_difference"]["max"] <= TOLERANCE_OF[activations]


def greedy(path: str, activations: Activations, prompts: list[Reference]) -> Json:
    """Through the whole engine: continuous batches, chunked prefill."""
    llm = LLM(path, attention="cpu", activations=activations.value)
    num_tokens = len(prompts[0].ids)
    completions = llm.generate(
        [prompt.prompt_ids for prompt in prompts], max_tokens=num_tokens, ignore_eos=True, temperature=0.0
    )
    flips = find_flips(
        [completion.token_ids for completion in completions],
        [prompt.ids for prompt in prompts],
        [prompt.gaps for prompt in prompts],
        num_tokens=num_tokens,
    )
    return {
        "prompts": len(prompts),
        "tokens_of_each": num_tokens,
        "flips": [[flip.prompt, flip.position, round(flip.gap, 4)] for flip in flips],
    }


def forced(path: str, activations: Activations, prompts: list[Reference]) -> Json:
    """Every position as a row of a prefill chunk."""
    device = jax.local_devices()[0]
    backend = choose_backend(device, Wishes(attention="cpu", activations=activations.value))
    model = load_placed(path, with_forms(backend, path))
    longest = max(len(prompt.prompt_ids) + len(prompt.ids) for prompt in prompts)
    decoder = ForcedDecoder(
        model, max_tokens=longest, chunk_tokens=CHUNK_TOKENS, block_tokens=16, kernels=backend.kernels
    )
    scores = [decoder.scores(prompt.prompt_ids, prompt.ids) for prompt in prompts]
    off = np.abs(
        np.array([value for of in scores for value, _ in of]) - np.concatenate([prompt.logprobs for prompt in prompts])
    )
    is_best = np.array([best for of in scores for _, best in of])
    gaps = np.concatenate([prompt.gaps for prompt in prompts])[~is_best]
    return {
        "positions": off.size,
        "changed": int((~is_best).sum()),
        "changed_share": round(float((~is_best).mean()), 5),
        "changed_beyond_near_ties": int((gaps >= FLIP_GAP).sum()),
        "largest_gap_of_a_change": round(float(gaps.max()), 4) if gaps.size else None,
        "logprob_difference": {
            "mean": float(f"{off.mean():.3g}"),
            **{f"p{q:g}": float(f"{np.percentile(off, q):.3g}") for q in (50, 99)},
            "max": float(f"{off.max():.3g}"),
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
