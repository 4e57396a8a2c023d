"""What an op does to its arguments, as far as a replay must know: told once per overload, from its schema and a few tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

aten = torch.ops.aten


class OpClass(Enum):
    """How the recorder treats an op."""

    VIEW = auto()
    """Gives its input another shape: makes no value, and is never run again."""
    REPLAYED = auto()
    """Can be run again, and then makes the same bytes."""
    OPAQUE = auto()
    """Is not run again: its values are roots."""


@dataclass(frozen=True, slots=True)
class OpKind:
    """What is known of one overload."""

    op_class: OpClass
    written: tuple[int | str, ...] = ()
    """The arguments that it writes to, by position or, if they are keyword-only, by name."""
    is_random: bool = False
    """Whether it draws from a random number generator."""
    overwrites: bool = False
    """Whether nothing of what was in the written arguments before remains, if they cover their storages."""
    statistics: tuple[int, ...] = ()
    """Positions of running statistics that it updates in training mode, though its schema or a version counter may not tell."""
    training_at: int = -1
    """The position of the flag for training mode."""
    replayed_by: OpOverload | None = None
    """The overload without statistics, where they cannot be None."""
    may_cross: bool = False
    """Whether it may copy from one device to another: such copies are not made again."""

    @property
    def is_plain(self) -> bool:
        """Whether it makes new values from old ones, and does nothing else, unless it copies to another device."""
        return self._only_computes and not self.written

    @property
    def is_in_place(self) -> bool:
        """Whether it makes a new value of its first argument, where that was, and does nothing else."""
        return self._only_computes and self.written == (0,) and not (self.overwrites or self.may_cross)

    @property
    def _only_computes(self) -> bool:
        return self.op_class is OpClass.REPLAYED and not (self.statistics or self.is_random)


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp", "symm_mem"})
_REPLAYED_NAMESPACES = frozenset({"aten", "prims", "torchvision"})

_FACTORIES = """
    arange eye empty empty_like empty_permuted empty_strided empty_quantized full full_like linspace logspace new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor zeros zeros_like _efficientzerotensor
    tril_indices triu_indices
"""
"""Fresh memory with nothing, or nothing of interest, in it. What a kernel of Triton or a NumPy writer puts there is not
recorded, so it is kept as it is found."""

_UNTRUSTED = """
    _cudnn_rnn miopen_rnn mkldnn_rnn_layer _cudnn_init_dropout_state _local_scalar_dense nonzero nonzero_static
    masked_select unique_consecutive unique_dim _unique _unique2 repeat_interleave bincount record_stream _pin_memory
    pin_memory resize_ resize_as_ set_ _resize_output_ from_file lift lift_fresh_copy _copy_from _copy_from_and_resize
    _batch_norm_with_update batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
    _fused_moving_avg_obs_fq_helper _assert_async _assert_tensor_metadata
"""
"""They read the device from the host, hide a state, change what a storage is, or make what cannot be trusted."""

_NOT_REPLAYED = frozenset(f"aten::{name}" for name in (_FACTORIES + _UNTRUSTED).split())

_OVERWRITERS = frozenset(
    {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_"}
    | {"aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_"}
)

_CROSSING = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "aten::_foreach_copy_"})

_BATCH_NORM_STATISTICS, _BATCH_NORM_TRAINING_AT = (3, 4), 5
_BATCH_NORMS: dict[OpOverload, OpOverload | None] = {
    aten.native_batch_norm.default: None,
    aten.cudnn_batch_norm.default: None,
    aten.miopen_batch_norm.default: None,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit.no_stats,
}
"""They write running statistics in training mode; without them they compute the same."""

_kinds: dict[Any, OpKind] = {}


def kind_of(func: Any) -> OpKind:
    """Return what is known of an op: an `OpOverload` or a `HigherOrderOperator`."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _classify(func)
    return kind


def _classify(func: Any) -> OpKind:
    if isinstance(func, HigherOrderOperator) or not isinstance(func, OpOverload):
        return OpKind(OpClass.OPAQUE)
    if func in _BATCH_NORMS:
        return OpKind(
            OpClass.REPLAYED,
            statistics=_BATCH_NORM_STATISTICS,
            training_at=_BATCH_NORM_TRAINING_AT,
            replayed_by=_BATCH_NORMS[func],
        )
    schema = func._schema
    written: list[int | str] = []
    is_out = False
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
            is_out = is_out or argument.is_out
    if not _can_run_again(func):
        return OpKind(OpClass.OPAQUE, tuple(written))
    # Who writes an op seldom says that it draws random numbers.
    is_random = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _REPLAYED_NAMESPACES
    may_cross = schema.name in _CROSSING
    if written:
        overwrites = is_out or schema.name in _OVERWRITERS
        return OpKind(OpClass.REPLAYED, tuple(written), is_random=is_random, overwrites=overwrites, may_cross=may_cross)
    if any(returned.alias_info is not None for returned in schema.returns):
        return OpKind(OpClass.VIEW)
    return OpKind(OpClass.REPLAYED, is_random=is_random, may_cross=may_cross)


def _can_run_again(func: OpOverload) -> bool:
    if func._schema.name in _NOT_REPLAYED:
        return False
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return False
    if func.namespace in _REPLAYED_NAMESPACES:
        return True
    # A custom op says so if it only computes; what it does beside that is an effect that it has registered.
    return torch.Tag.pt2_compliant_tag in func.tags and func.namespace not in _COLLECTIVES and not _has_effect(func)


def _has_effect(func: OpOverload) -> bool:
    from torch._higher_order_ops.effects import _get_effect

    return _get_effect(func) is not None
