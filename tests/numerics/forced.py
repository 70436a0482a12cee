"""Teacher forcing through the paged decoder: logprobs of given tokens, a whole chunk of positions per step.

The engine takes logits of the last token of a chunk only; here every row goes through the head. Packing, page tables,
decoder and kernels are the engine's own.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from headrace.model.decoder import StepInputs, forward, logits, new_pool
from headrace.model.load import LoadedModel
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import Kernels, KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.plan import Bucket, PrefillSegment, ProgramKind, SlotRef, StepPlan
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.load import PlacedModel

Array = jax.Array
SLOT = SlotRef(0, 1)


class ForcedDecoder:
    """One sequence at a time, in chunks of chunk_tokens, its pages dealt out in a shuffled order.

    Args:
      model: with weights as the kernels read them. max_tokens: of a sequence. chunk_tokens: a multiple of block_tokens.
    """

    def __init__(
        self,
        model: LoadedModel | PlacedModel,
        *,
        max_tokens: int,
        chunk_tokens: int,
        block_tokens: int = 64,
        page_size: int = 16,
        kernels: Kernels = Kernels(),
    ) -> None:
        pages = -(-max_tokens // page_size)
        self._config = SchedulerConfig(
            num_slots=1,
            page_size=page_size,
            num_pages=pages + 1,
            max_context=pages * page_size,
            chunk_tokens=chunk_tokens,
            block_tokens=block_tokens,
            decode_rows=(1,),
            prefill_tokens=(chunk_tokens,),
            max_segments=1,
        )
        self._bucket = Bucket(ProgramKind.MIXED, 1, chunk_tokens)
        self._layout = InputLayout(self._bucket, self._config, model.config.vocab_size)
        self._model_config = model.config
        self._weights, self._kernels = jax.device_put(model.weights), kernels
        self._pool = new_pool(model.config, pages + 1, page_size)
        self._page_ids = tuple(int(page) for page in np.random.default_rng(pages).permutation(pages) + 1)
        self._step = jax.jit(self._run, donate_argnums=1)

    def logprobs(self, prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[float]:
        """Of each continuation token after everything before it."""
        return [logprob for logprob, _ in self.scores(prompt_ids, continuation_ids)]

    def scores(self, prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> list[tuple[float, bool]]:
        """As logprobs, and whether greedy sampling would take the token."""
        fed, targets = [*prompt_ids, *continuation_ids[:-1]], [*prompt_ids[1:], *continuation_ids]
        found: list[tuple[float, bool]] = []
        for start in range(0, len(fed), self._config.chunk_tokens):
            chunk = fed[start : start + self._config.chunk_tokens]
            target_T = np.zeros(self._config.chunk_tokens, np.int32)
            target_T[: len(chunk)] = targets[start : start + len(chunk)]
            packed = self._layout.pack(self._plan(start, chunk), {SLOT.slot: 0})
            self._pool, logprob_T, is_best_T = self._step(self._weights, self._pool, packed.array, target_T)
            scores = zip(np.asarray(logprob_T).tolist(), np.asarray(is_best_T).tolist(), strict=True)
            found.extend(list(scores)[: len(chunk)])
        return found[len(prompt_ids) - 1 :]

    def _plan(self, start: int, chunk: list[int]) -> StepPlan:
        segment = PrefillSegment(
            slot=SLOT, start=start, token_ids=tuple(chunk), page_ids=self._page_ids, samples=True, output_index=0
        )
        return StepPlan(step_id=0, bucket=self._bucket, loads=(), decode=(), prefill=(segment,))

    def _run(
        self, weights: Weights[Array], pool: KVPool, packed: Array, target_T: Array
    ) -> tuple[KVPool, Array, Array]:
        fields, layout = self._layout.unpack(packed[0]), self._layout
        meta = layout.meta(fields)
        position_T = (fields.blk_pos_J[:, None] + jnp.arange(self._config.block_tokens)).reshape(-1)
        inputs = StepInputs(
            token_T=jnp.concatenate([fields.token_B, fields.token_T]),
            position_T=jnp.concatenate([meta.position_B, position_T]),
            meta=meta,
        )
        hidden_TD, pool = forward(weights, inputs, pool, self._model_config, kernels=self._kernels)
        logprob_TV = jax.nn.log_softmax(logits(weights, hidden_TD[layout.rows :], kernels=self._kernels))
        logprob_T = jnp.take_along_axis(logprob_TV, target_T[:, None], axis=1)[:, 0]
        return pool, logprob_T, logprob_TV.argmax(axis=1) == target_T
