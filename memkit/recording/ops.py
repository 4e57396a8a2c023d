"""How ops treat their arguments: from their schemas, a few tables, and the user's `pure_ops`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from memkit.core import torch_private
from memkit.recording.borders import BORDER
from memkit.recording.recorded import OpClass, OpTraits

if TYPE_CHECKING:
    from memkit.core.torch_private import OpOverload

aten = torch.ops.aten
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "torchvision", "torch_attn"})
"""Other ops may draw from Python's generator, count calls, or read changing state, and neither schema nor tags tell
(`torch.library.custom_op` sets `pt2_compliant_tag` by itself)."""

_FACTORIES = """
    arange eye empty empty_like empty_permuted empty_strided empty_quantized full full_like linspace logspace new_empty
    new_empty_strided new_full new_ones new_zeros ones ones_like range scalar_tensor zeros zeros_like _efficientzerotensor
    tril_indices triu_indices
"""  # ops that return new memory. A Triton kernel or NumPy may write to it unseen, so it is kept rather than recomputed
_UNTRUSTED = """
    _local_scalar_dense nonzero nonzero_static masked_select unique_consecutive unique_dim _unique _unique2 repeat_interleave
    bincount _pin_memory pin_memory lift lift_fresh_copy _copy_from _copy_from_and_resize _assert_async _assert_tensor_metadata
"""  # ops that make the host wait for the device, or give results that can't be reproduced. Regions may run them again
_VIEW_UNTOLD = "aten::_unsafe_view"  # its schema hides from autograd that it is a view, mostly of a matrix product
_HIDING_STATE = """
    _cudnn_rnn miopen_rnn mkldnn_rnn_layer _cudnn_init_dropout_state record_stream resize_ resize_as_ set_ _resize_output_
    from_file _batch_norm_with_update batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_update_stats
    _fused_moving_avg_obs_fq_helper
"""  # ops that have hidden state or change storages: no region may have them
_NOT_REPLAYED = frozenset(f"aten::{name}" for name in (_FACTORIES + _UNTRUSTED + _HIDING_STATE).split())
_VALUE_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
_HIDING = frozenset(f"aten::{name}" for name in _HIDING_STATE.split())
_OVERWRITERS = frozenset(
    {"aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::bernoulli_", "aten::random_"}
    | {"aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_"}
)

_CROSSING = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "aten::_foreach_copy_"})
_BATCH_NORMS: dict[OpOverload, OpOverload | None] = {
    aten.native_batch_norm.default: None,
    aten.cudnn_batch_norm.default: None,
    aten.miopen_batch_norm.default: None,
    **dict(zip(torch_private.known("batch_norm_legit"), torch_private.known("batch_norm_legit_no_stats"), strict=False)),
}  # ops that write running statistics in training mode, each with the overload that computes the same without them


class OpKinds:
    def __init__(self, pure_ops: frozenset[str]) -> None:
        self._pure_ops = pure_ops
        self._kinds: dict[Any, OpTraits] = {}

    def __reduce__(self) -> tuple[Callable[..., OpKinds], tuple[frozenset[str]]]:
        return op_kinds, (self._pure_ops,)

    def of(self, func: Any) -> OpTraits:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._classify(func)
        return kind

    def _classify(self, func: Any) -> OpTraits:
        if not isinstance(func, torch_private.OpOverload):
            return OpTraits(OpClass.UNKNOWN, why_kept=f"{_name_of(func) or func} is a higher-order op, which is not run again")
        if func in _BATCH_NORMS:
            return OpTraits(OpClass.REPLAYED, statistics=(3, 4), training_at=5, replayed_by=_BATCH_NORMS[func])
        schema = torch_private.schema_of(func)
        if schema.name == BORDER:
            return OpTraits(OpClass.BORDER)
        written: list[int | str] = []
        is_out = False
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(argument.name if argument.kwarg_only else position)
                is_out = is_out or argument.is_out
        why_kept = self._why_kept(func)
        if why_kept:
            return OpTraits(OpClass.UNKNOWN, tuple(written), why_kept=why_kept)
        if schema.name in _NOT_REPLAYED or not _VALUE_TAGS.isdisjoint(func.tags):
            return OpTraits(OpClass.OPAQUE, tuple(written), hides_state=schema.name in _HIDING)
        # Authors of ops seldom declare that they draw random numbers.
        is_random = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _KNOWN_NAMESPACES
        may_cross = schema.name in _CROSSING
        if written:
            overwrites = is_out or schema.name in _OVERWRITERS
            return OpTraits(OpClass.REPLAYED, tuple(written), is_random=is_random, overwrites=overwrites, may_cross=may_cross)
        if schema.name == _VIEW_UNTOLD or any(returned.alias_info is not None for returned in schema.returns):
            return OpTraits(OpClass.VIEW)
        return OpTraits(OpClass.REPLAYED, is_random=is_random, may_cross=may_cross)

    def _why_kept(self, func: OpOverload) -> str:
        name = torch_private.schema_of(func).name
        if func.namespace in _KNOWN_NAMESPACES:
            return ""
        if self._pure_ops.isdisjoint((name, f"{func.namespace}::*")):
            return f"op {name} is not known to be pure; if it is, name it in pure_ops"
        return "" if torch_private.higher_order_effect(func) is None else f"op {name} has registered an effect"


@functools.lru_cache(maxsize=64)
def op_kinds(pure_ops: frozenset[str] = frozenset()) -> OpKinds:
    return OpKinds(pure_ops)


# The user's marks


def names_of_ops(pure_ops: object) -> frozenset[str]:
    """Return "namespace::name", or "namespace::*" for a whole namespace; ValueError if no op or no need to declare it."""
    if isinstance(
        pure_ops, str | torch_private.OpOverload | torch_private.OpOverloadPacket | torch_private.CustomOpDef
    ) or not isinstance(pure_ops, Iterable):
        raise TypeError(f"pure_ops is a list of ops, or of their names; found {pure_ops!r}. Put it into a list")
    return frozenset(map(_named, pure_ops))


def _named(op: object) -> str:
    name = op if isinstance(op, str) else _name_of(op)
    if name is None:
        raise TypeError(
            "pure_ops needs ops, such as torch.ops.mylib.myop or what torch.library.custom_op returns, or their names, such as "
            f'"mylib::myop" or "mylib::*"; found {op!r}'
        )
    if re.fullmatch(r"\w+::(\w+|\*)", name) is None:
        raise ValueError(f'pure_ops needs names such as "mylib::myop", or "mylib::*" for all ops of a library; found "{name}"')
    namespace = name.partition("::")[0]
    if namespace in _KNOWN_NAMESPACES:
        raise ValueError(
            f"pure_ops needs ops that memkit does not know; found {name}. Leave it out: what the ops of {namespace} do is "
            "known, and those that are not run again cannot be"
        )
    if namespace == "higher_order":
        raise ValueError(f"pure_ops needs ops on tensors; found {name}. Leave it out: higher-order ops are not run again")
    return name


def _name_of(op: object) -> str | None:
    if isinstance(op, torch_private.CustomOpDef):
        op = torch_private.op_of_custom(op)
    if isinstance(op, torch_private.OpOverload):
        return str(torch_private.schema_of(op).name)
    if isinstance(op, torch_private.OpOverloadPacket):
        return torch_private.packet_name(op)
    return f"higher_order::{op.name()}" if isinstance(op, torch_private.HigherOrderOperator) else None
