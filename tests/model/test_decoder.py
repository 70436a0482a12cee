"""The paged decoder against the oracle, which shares nothing with it, and against itself in other arrangements."""

import functools

import jax
import numpy as np
import pytest

from headrace.model import oracle
from headrace.model.config import ModelConfig
from headrace.model.decoder import stack_layers
from headrace.model.init import init_weights
from headrace.model.weights import Weights
from headrace.pallas_kernels.types import KVPool
from tests.model.paged_steps import MAX_PAGES, PAGES, Segment, new_pool, pages, run
from tests.model.tiny import TINY

UNTIED = ModelConfig(
    family="llama",
    vocab_size=80,
    num_layers=3,
    width=48,
    ffn_width=64,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
    rope_theta=5000.0,
    rms_norm_eps=1e-6,
    tied_embeddings=False,
)
IDS = tuple(int(i) for i in np.random.default_rng(0).integers(0, 80, 45))


def chunked(cfg: ModelConfig, weights: Weights[jax.Array], length: int, chunk: int, own: tuple[int, ...]) -> np.ndarray:
    """Logits after a prompt that is read in chunks."""
    pool, out = new_pool(cfg), None
    for start in range(0, length, chunk):
        segment = Segment(IDS, start, min(chunk, length - start), own)
        out, pool = run(cfg, weights, pool, [None], [segment], blocks=6)
    return out[1]


@functools.cache
def weights_of(cfg: ModelConfig) -> Weights[jax.Array]:
    return jax.device_put(init_weights(cfg, seed=7))


@functools.cache
def expected(cfg: ModelConfig) -> np.ndarray:
    return np.asarray(oracle.logits_SV(weights_of(cfg), cfg, IDS))


@pytest.mark.parametrize("cfg", [TINY, UNTIED], ids=["tied", "untied"])
class TestOracle:
    def test_decode_token_by_token(self, cfg: ModelConfig) -> None:
        pool = new_pool(cfg)
        for start in range(20):
            out, pool = run(cfg, weights_of(cfg), pool, [Segment(IDS, start, 1, pages(1))], [], blocks=0)
            np.testing.assert_allclose(out[0], expected(cfg)[start], atol=3e-5, rtol=1e-4)

    @pytest.mark.parametrize("chunk", [4, 8, 16, 48])
    def test_any_chunk_size(self, cfg: ModelConfig, chunk: int) -> None:
        """O26: chunk borders at and beside blocks and pages; and prompts that end anywhere in them."""
        for length in {min(n, len(IDS)) for n in (1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 45)}:
            out = chunked(cfg, weights_of(cfg), length, chunk, pages(2))
            np.testing.assert_allclose(out, expected(cfg)[length - 1], atol=3e-5, rtol=1e-4)

    def test_prefill_then_decode_with_others_in_every_step(self, cfg: ModelConfig) -> None:
        other_ids = tuple(reversed(IDS))
        own, other, third = pages(3)[:6], pages(3)[6:], tuple(sorted(set(range(1, PAGES)) - set(pages(3))))[:12]
        prompt, rest = Segment(IDS, 0, 9, own), Segment(other_ids, 0, 16, other)
        _, pool = run(cfg, weights_of(cfg), new_pool(cfg), [None, None, None], [prompt, rest], blocks=6)
        for start in range(9, 20):
            row = Segment(IDS, start, 1, own)
            mate = Segment(other_ids, start + 7, 1, other)
            chunk = Segment(IDS, 4 * (start - 9), 4, third)
            out, pool = run(cfg, weights_of(cfg), pool, [mate, None, row], [chunk], blocks=6)
            np.testing.assert_allclose(out[2], expected(cfg)[start], atol=3e-5, rtol=1e-4)

    def test_scanned_layers_equal_unrolled_ones(self, cfg: ModelConfig) -> None:
        segment = Segment(IDS, 0, 30, pages(4))
        unrolled, pool = run(cfg, weights_of(cfg), new_pool(cfg), [None], [segment], blocks=6)
        scanned, scanned_pool = run(cfg, stack_layers(weights_of(cfg)), new_pool(cfg), [None], [segment], blocks=6)
        np.testing.assert_allclose(scanned[1], unrolled[1], atol=1e-5)
        np.testing.assert_allclose(scanned_pool.pages_RKWC, pool.pages_RKWC, atol=1e-5)


class TestBits:
    """Within one program a row's bits depend on nothing but its own sequence."""

    def prepared(self, own: tuple[int, ...], fill: float = 0.0) -> KVPool:
        """A pool in which the first 21 tokens of IDS are cached in own."""
        _, pool = run(TINY, weights_of(TINY), new_pool(TINY, fill), [None], [Segment(IDS, 0, 21, own)], blocks=6)
        return pool

    def test_batch_mates_and_slot(self) -> None:
        own = pages(5)
        pool = self.prepared(own)
        row = Segment(IDS, 21, 1, own)
        alone, _ = run(TINY, weights_of(TINY), pool, [row, None, None, None], [], blocks=0)
        free = tuple(sorted(set(range(1, PAGES)) - set(own)))
        for slot in range(4):
            mates = [Segment(IDS, 3 * slot + i, 1, free[10 * i : 10 * i + 10]) for i in range(4)]
            decode = [*mates[:slot], row, *mates[slot + 1 :]]
            out, _ = run(TINY, weights_of(TINY), pool, decode, [], blocks=0)
            np.testing.assert_array_equal(out[slot], alone[0])

    def test_mates_in_a_mixed_step(self) -> None:
        own = pages(5)
        pool = self.prepared(own)
        free = tuple(sorted(set(range(1, PAGES)) - set(own)))[:MAX_PAGES]
        row = Segment(IDS, 21, 1, own)
        alone, _ = run(TINY, weights_of(TINY), pool, [row], [Segment(IDS, 0, 1, free)], blocks=6)
        busy, _ = run(TINY, weights_of(TINY), pool, [row], [Segment(IDS, 0, 40, free)], blocks=6)
        np.testing.assert_array_equal(busy[0], alone[0])

    def test_page_permutation(self) -> None:
        first, second = pages(5), pages(6)
        results = []
        for own in (first, second):
            out, _ = run(
                TINY, weights_of(TINY), self.prepared(own), [Segment(IDS, 21, 1, own), None, None, None], [], blocks=0
            )
            results.append(out[0])
        np.testing.assert_array_equal(results[1], results[0])

    def test_stale_pages(self) -> None:
        """NaN in every page that the sequence has not written, its own last page included."""
        own = pages(5)
        results = []
        for fill in (0.0, np.nan):
            pool = self.prepared(own, fill)
            out = []
            for start in range(21, 30):
                logits, pool = run(
                    TINY, weights_of(TINY), pool, [Segment(IDS, start, 1, own), None, None, None], [], blocks=0
                )
                out.append(logits[0])
            results.append(np.stack(out))
        assert np.isfinite(results[1]).all()
        np.testing.assert_array_equal(results[1], results[0])
