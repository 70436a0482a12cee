"""Collectives over one axis of a mesh, inside ``shard_map``; on an axis of one device they are nothing at all.

Results are the same on every device of the axis, bit for bit, so that branches and loops that depend on them agree.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """names: of an axis of the mesh, or of several that count as one, outermost first. size: devices along them all."""

    names: tuple[str, ...] = ()
    size: int = 1

    @property
    def index(self) -> Array | int:
        """Of this device, i32."""
        return 0 if self.size == 1 else lax.axis_index(self.names)

    def sum(self, x: Array) -> Array:
        return x if self.size == 1 else lax.psum(x, self.names)

    def max(self, x: Array) -> Array:
        return x if self.size == 1 else lax.pmax(x, self.names)

    def min(self, x: Array) -> Array:
        return x if self.size == 1 else lax.pmin(x, self.names)

    def of_last(self, x: Array) -> Array:
        """What the last device has, on all of them."""
        return x if self.size == 1 else self.sum(jnp.where(self.index == self.size - 1, x, 0))

    def to_next(self, x: Array) -> Array:
        """What the device before has; the first one gets zeros."""
        return lax.ppermute(x, self.names, [(i, i + 1) for i in range(self.size - 1)])

    def gather(self, x: Array, axis: int) -> Array:
        """The shards side by side along an axis of x, in the order of the devices."""
        if self.size == 1:
            return x
        return lax.all_gather(x, self.names, axis=axis, tiled=True)


ALONE = MeshAxis()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The axes that a model is cut over. tensor: heads and feed-forward width. expert: experts. stage: layers.
    vocabulary: stage and tensor together. data: sequences, each with its part of slots and pages."""

    tensor: MeshAxis = ALONE
    expert: MeshAxis = ALONE
    stage: MeshAxis = ALONE
    vocabulary: MeshAxis = ALONE
    data: MeshAxis = ALONE

    def sum(self, x: Array) -> Array:
        """Over both axes at once."""
        names = (*self.expert.names, *self.tensor.names)
        return lax.psum(x, names) if names else x


ONE_DEVICE = Shards()


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """A contiguous part of the vocabulary on each device of an axis. size: ids of the whole vocabulary; V is this
    device's part of it."""

    axis: MeshAxis
    size: int

    @property
    def part(self) -> int:
        return self.size // self.axis.size

    @property
    def first_id(self) -> Array | int:
        return self.axis.index * self.part

    def ids(self) -> Array:
        """i32 [V]: the ids of this part."""
        return jnp.arange(self.part, dtype=jnp.int32) + self.first_id

    def index_of(self, token: Array) -> Array:
        """Index of ids in this part; V (to be dropped) where they are elsewhere, and of the id ``size``."""
        if self.axis.size == 1:
            return token
        index = token - self.first_id
        return jnp.where((index >= 0) & (index < self.part), index, self.part)

    def part_of(self, x_V: Array) -> Array:
        """[V]: this part of an array of the whole vocabulary."""
        return x_V if self.axis.size == 1 else lax.dynamic_slice(x_V, (self.first_id,), (self.part,))

    def take(self, x_RV: Array, token_R: Array) -> Array:
        """[R]: x at one id of each row."""
        if self.axis.size == 1:
            return jnp.take_along_axis(x_RV, token_R[:, None], axis=-1)[:, 0]
        index_R = self.index_of(token_R)
        here_R = jnp.take_along_axis(x_RV, jnp.minimum(index_R, self.part - 1)[:, None], axis=-1)[:, 0]
        return self.axis.sum(jnp.where(index_R < self.part, here_R, 0))

    def top_k(self, x_RV: Array, count: int) -> tuple[Array, Array]:
        """(values, ids) of the largest, downwards, ties by lower id."""
        value_RX, index_RX = lax.top_k(x_RV, min(count, self.part))
        if self.axis.size == 1:
            return value_RX, index_RX
        values_RX = self.axis.gather(value_RX, axis=1)
        ids_RX = self.axis.gather(index_RX + self.first_id, axis=1)
        # Equal values lie in the order of their ids: within a part by top_k, between parts by their order.
        value_RX, place_RX = lax.top_k(values_RX, count)
        return value_RX, jnp.take_along_axis(ids_RX, place_RX, axis=1)
