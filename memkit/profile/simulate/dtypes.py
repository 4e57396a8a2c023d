"""Which mixtures of dtypes an operation takes on a target. The meta kernels of many operations take any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit import torch_private

if TYPE_CHECKING:
    from memkit.torch_private import OpOverload

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


class MixedDtypesError(RuntimeError):
    """Raised where a run with data would raise a RuntimeError: an operation does not take these dtypes together.

    Attributes:
        advice: what to do.
    """

    def __init__(
        self, message: str, advice: str = "Cast the model or its inputs (--dtype), or run under torch.autocast (--autocast)"
    ) -> None:
        super().__init__(message)
        self.advice = advice


def check_dtypes(op: OpOverload, args: Sequence[Any], target: str) -> None:
    """Raise if an operation on `target` does not take arguments of these dtypes together.

    Raises:
        MixedDtypesError: it does not.
    """
    positions = _ALIKE.get(op)
    if positions is not None:
        if op is _aten.convolution.default and target == "cpu" and not uses_onednn(*args):
            positions = positions[:-1]  # the CPU's own convolutions add any bias
        dtypes = _dtypes_at(args, positions)
        if len(dtypes) > 1:
            raise _refusal(op, dtypes)
        if op in _CLASS_DTYPES and args[1].dtype not in _CLASS_DTYPES[op]:
            needed = " or ".join(map(_text_of, _CLASS_DTYPES[op]))
            raise MixedDtypesError(
                f"{_name_of(op)} needs classes of {needed}; found {_text_of(args[1].dtype)}", "Cast them: targets.long()"
            )
        return
    positions = _NORMALIZATIONS[target].get(op)
    if positions is not None:
        tensor, parameters = args[0], _dtypes_at(args, positions)
        # CUDA's batch norm takes float32 parameters beside half precision, as the CPU's normalizations do.
        mixes = target == "cpu" or op is _aten.native_batch_norm.default
        mixed = mixes and tensor.dtype in _HALF_DTYPES and parameters == [torch.float32]
        if parameters not in ([], [tensor.dtype]) and not mixed:
            raise _refusal(op, [tensor.dtype, *(dtype for dtype in parameters if dtype != tensor.dtype)])


def uses_onednn(tensor: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> bool:
    """Tell whether the CPU would leave a convolution to oneDNN; `how` are its further arguments."""
    # Of the tensors only shapes and dtypes matter: one element is enough.
    on_cpu = [
        None if given is None else given.new_empty((), device="cpu").expand(given.shape) for given in (tensor, weight, bias)
    ]
    backend = torch_private.select_conv_backend(*on_cpu, *how, bias_sizes=None)
    return "Slow" not in str(backend)  # torch has not given all of oneDNN's a name


def _dtypes_at(args: Sequence[Any], positions: Sequence[int]) -> list[torch.dtype]:
    """Return the different dtypes of the tensors at some positions, in order."""
    found = (args[position] for position in positions if position < len(args))
    return list(dict.fromkeys(value.dtype for value in found if isinstance(value, Tensor)))


def _refusal(op: OpOverload, dtypes: Sequence[torch.dtype]) -> MixedDtypesError:
    names = " and ".join(map(_text_of, dtypes))
    return MixedDtypesError(f"{_name_of(op)} needs tensors of one dtype; found {names}")


def _name_of(op: OpOverload) -> str:
    return str(torch_private.schema_of(op).name).removeprefix("aten::")


def _text_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CLASS_DTYPES: dict[OpOverload, tuple[torch.dtype, ...]] = {
    _aten.nll_loss_forward.default: (torch.int64, torch.uint8),
    _aten.nll_loss2d_forward.default: (torch.int64,),
}
"""Operations whose second argument names classes, and the dtypes that it may have."""

# Of these operations all tensors at these positions have the same dtype.
_ALIKE: dict[OpOverload, tuple[int, ...]] = {
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.mv.default: (0, 1),
    _aten.dot.default: (0, 1),
    _aten.addmm.default: (0, 1, 2),
    _aten.addmv.default: (0, 1, 2),
    _aten.addbmm.default: (0, 1, 2),
    _aten.baddbmm.default: (0, 1, 2),
    _aten.convolution.default: (0, 1, 2),
    **dict.fromkeys(torch_private.known("prelu_kernel", "euclidean_dist", "cdist_forward", "grouped_mm"), (0, 1)),
    _aten.linalg_cross.default: (0, 1),
    _aten.grid_sampler_2d.default: (0, 1),
    _aten.grid_sampler_3d.default: (0, 1),
    _aten.nll_loss_forward.default: (0, 2),
    _aten.nll_loss2d_forward.default: (0, 2),
    _aten.binary_cross_entropy.default: (0, 1),
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default), (0, 2)),
    **dict.fromkeys(torch_private.known("index_put_impl", "unsafe_index_put"), (0, 2)),
    **dict.fromkeys((_aten.index_add.default, _aten.index_add_.default), (0, 3)),
    **dict.fromkeys((_aten.index_copy.default, _aten.index_copy_.default), (0, 3)),
    **dict.fromkeys((_aten.index_reduce.default, _aten.index_reduce_.default), (0, 3)),
    **dict.fromkeys((_aten.put.default, _aten.put_.default), (0, 2)),
}
# And of these the parameters, and on the CPU the running statistics, at these positions, go with the input.
_NORMALIZATIONS: dict[str, dict[OpOverload, tuple[int, ...]]] = {
    "cuda": {
        _aten.native_batch_norm.default: (1, 2),
        _aten.native_group_norm.default: (1, 2),
        _aten.native_layer_norm.default: (2, 3),
    },
    "cpu": {
        _aten.native_batch_norm.default: (1, 2, 3, 4),
        _aten.native_group_norm.default: (1, 2),
        _aten.native_layer_norm.default: (2, 3),
    },
}
