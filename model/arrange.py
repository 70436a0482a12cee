"""From the order of a stored tensor to that of its weight: inputs first, halves of heads side by side."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.model.gguf_groups import Groups
from headrace.model.group_quant import as_integers
from headrace.model.quant_form import QuantForm
from headrace.model.specs import ParamSpec
from headrace.pallas_kernels.types import GroupQuant


def arrange(spec: ParamSpec, values: np.ndarray, out: np.ndarray, *, interleaved_rotary: bool) -> None:
    """Write a stored tensor in the layout and type of its spec.

    Args:
      values: as stored, of one expert where the spec has many. out: [spec.piece_shape], of spec.read_dtype.
      interleaved_rotary: rows of rotated heads lie in llama.cpp's order, in which the two halves of a head alternate;
        they are put back into halves.
    Source: the permutation of convert_hf_to_gguf.py in ggml-org/llama.cpp (LlamaModel.permute).
    """
    if spec.is_product and not spec.source.is_inputs_first:
        values = values.T
    if spec.source.half is not None:
        values = values[..., spec.source.half :: 2]
    _place(spec, values, out, interleaved_rotary=interleaved_rotary)


def _place(spec: ParamSpec, values: np.ndarray, out: np.ndarray, *, interleaved_rotary: bool) -> None:
    if spec.is_rotated and spec.head_dim is not None and interleaved_rotary:
        half = spec.head_dim // 2
        heads = (*out.shape[:-1], -1)
        out.reshape(*heads, 2, half)[...] = values.reshape(*heads, half, 2).swapaxes(-1, -2)
    else:
        out[...] = values


@dataclass(frozen=True, slots=True)
class QuantWindow:
    """Where the groups of one weight go, or of one expert.

    Rows of a stored tensor are outputs, and they stay side by side in memory: nothing is turned on the way.

    values: int8 [..., K, N]. scale, offset: [..., G, N].
    """

    values: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None

    @classmethod
    def empty(cls, spec: ParamSpec, form: QuantForm) -> "QuantWindow":
        """form: of the file."""
        *lead, contraction, columns = spec.matrix_shape

        def array(rows: int, dtype: np.dtype) -> np.ndarray:
            return np.empty((*lead, columns, rows), dtype).swapaxes(-1, -2)

        groups = form.num_groups(contraction)
        return cls(
            array(contraction, np.dtype(np.int8)),
            array(groups, form.scale_dtype),
            array(groups, form.scale_dtype) if form.is_affine else None,
        )

    def by_expert(self) -> Iterator["QuantWindow"]:
        for index in range(self.values.shape[0]):
            offset = None if self.offset is None else self.offset[index]
            yield QuantWindow(self.values[index], self.scale[index], offset)

    def fill(
        self, spec: ParamSpec, form: QuantForm, groups: Groups, rows: tuple[int, int], *, interleaved_rotary: bool
    ) -> None:
        """form: of the file. rows: first and last of the stored tensor's that the groups are."""
        first, last = rows
        parts = (
            (as_integers(groups.values, form), self.values),
            (groups.scale, self.scale),
            (groups.offset, self.offset),
        )
        for values, out in parts:
            if values is not None and out is not None:
                turned = values.reshape(last - first, -1).T
                _place(spec, turned, out[..., first:last], interleaved_rotary=interleaved_rotary)

    def weight(self, form: QuantForm, dtype: np.dtype) -> GroupQuant:
        """In the same memory. form: of the file. dtype: what the weight stands for."""
        return GroupQuant(self.values.view(form.values_dtype), self.scale, self.offset, stands_for=dtype.name)
