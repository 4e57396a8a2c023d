"""Handles of saved tensors that are the same in all rooms: kept, forwarded to the hooks outside, taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memkit.core.kept import FlattenedHandle, ForwardedHandle, KeptHandle
from tests.weights.wrapped import Int8


def _forwarded(tensor: Tensor, *, is_checked: bool) -> ForwardedHandle:
    return ForwardedHandle(tensor, lambda given: [given.clone()], lambda packed: packed[0], is_checked=is_checked)


@pytest.mark.parametrize("is_checked", [False, True])
def test_forwarded_is_what_the_hooks_outside_give_back_unless_it_is_written_to(is_checked: bool) -> None:
    tensor = torch.arange(4.0)
    handle = _forwarded(tensor, is_checked=is_checked)

    assert torch.equal(handle.unpack(), torch.arange(4.0))
    tensor.add_(1)

    assert handle.is_unchanged() is not is_checked
    if not is_checked:
        assert torch.equal(handle.unpack(), torch.arange(4.0))
        return
    assert (handle.alias.untyped_storage().nbytes(), handle.size) == (0, (4,))
    with pytest.raises(RuntimeError, match=r"FloatTensor \[4\]\] is at version 1; expected version 0"):
        handle.unpack()


def _wrapper() -> Any:
    return Int8.of(torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2, 1))


def test_flattened_packs_what_a_tensor_wraps_but_for_what_does_not_leave() -> None:
    wrapper = _wrapper()
    first, *others = wrapper.__tensor_flatten__()[0]
    packed: list[Tensor] = []

    def pack(part: Tensor) -> KeptHandle:
        packed.append(part)
        return KeptHandle(part)

    whole = FlattenedHandle(wrapper, pack).unpack()
    assert (len(packed), type(whole)) == (1 + len(others), type(wrapper))
    assert torch.equal(whole.dequantize(), wrapper.dequantize())
    packed.clear()
    found: Any = FlattenedHandle(wrapper, pack, lambda _, name: name == first).unpack()

    assert [id(part) for part in packed] == [id(getattr(wrapper, first))]
    assert all(getattr(found, name) is getattr(wrapper, name) for name in others)
