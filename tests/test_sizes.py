from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memkit.core.sizes import check_budget, check_budget_bytes, check_bytes, format_bytes
from memkit.core.tensors import Geometry, byte_view, storage_bytes, storage_key, storages_of, tensor_over, unique_storages

BASE = torch.zeros(10)
VALUES, OFFSETS = torch.zeros(6, 2), torch.tensor([0, 2, 6])


@pytest.mark.parametrize(
    ("tensors", "num_bytes"),
    [
        ([BASE, BASE[2:], BASE.view(2, 5)], 40),
        ([BASE[:1]], 40),  # the whole storage
        ([torch.zeros(1).expand(1000)], 4),
        ([torch.eye(4).to_sparse()], 2 * 4 * 8 + 4 * 4),
        ([torch.empty(256, 4, device="meta", dtype=torch.bfloat16)], 2048),
    ],
)
def test_each_storage_counts_once(tensors: list[torch.Tensor], num_bytes: int) -> None:
    assert storage_bytes(tensors) == num_bytes


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_wrappers_and_views_have_the_storages_of_their_parts() -> None:
    weight = nn.Linear(3, 5, bias=False).weight
    nested = torch.nested.nested_tensor_from_jagged(VALUES, OFFSETS)

    assert set(unique_storages([weight])) == set(unique_storages([weight.t()]))
    assert set(unique_storages([VALUES, OFFSETS])) <= set(unique_storages([nested]))
    assert len(list(storages_of(torch.eye(4).to_sparse_csr()))) == 3


def test_key_is_of_the_storage_not_of_the_address() -> None:
    first, second = torch.empty(0), torch.empty(0)

    assert first.data_ptr() == second.data_ptr()
    assert storage_key(first.untyped_storage()) != storage_key(second.untyped_storage())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((1, "1 byte"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (700_000, "683.59 KiB"), (2**20 - 1, "1024.00 KiB")),
        *((2**20, "1.00 MiB"), (3 * 2**30, "3072.00 MiB")),
    ],
)
def test_small_sizes_are_printed_in_small_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        *((1, 1), (np.int32(7), 7), ("4096", 4096), ("4096B", 4096), ("0.7B", 1), ("3kB", 3000), ("2 MB", 2 * 10**6)),
        *(("8GB", 8 * 10**9), ("0.5TB", 5 * 10**11), ("1KiB", 1024), ("512 MiB", 2**29), ("1.5 gib", 3 * 2**29)),
        ("  2TiB ", 2**41),
    ],
)
def test_sizes_are_bytes_or_text_with_a_unit(size: int | str, num_bytes: int) -> None:
    assert check_bytes("size", size) == num_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "8 G", "8GiBs", "-1GiB", "+1GiB", "1e9", "1,5GiB", ".5GiB", "1.GiB", "8 GiB 2", "8GiB\nx"]
)
def test_text_that_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError) as error:
        check_bytes("min_bytes", size)

    assert str(error.value) == f'min_bytes is a number of bytes, or text such as "8GiB" or "512 MiB"; found "{size}"'


IS_SHARE = "a budget that is a float is the share of the saved bytes that stays, above 0 and at most 1; found "
NO_UNIT = (
    "has no unit of bytes. For a share of the saved bytes that stays write the float {}, for bytes an int, or text such as"
)
NO_SIZE = 'min_bytes is a number of bytes, or text such as "8GiB"; found {!r}'


@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        (check_bytes, -5, "min_bytes is a number of bytes, 0 or more; found -5"),
        (
            lambda size: check_budget_bytes("limit", size, may_be_zero=True),
            -1,
            "limit is a number of bytes, 0 or more; found -1",
        ),
        *((check_bytes, size, TypeError(NO_SIZE.format(size))) for size in (True, 8e9, None, b"8GiB", [8])),
        *(
            (check_budget_bytes, size, f"budget must be more than 0 bytes; found {size!r}")
            for size in (0, -1, "0", "0.0 GiB", "0.1B")
        ),
        *(
            (check_budget, size, f'budget={size!r} reads as {size} bytes or as {size} GiB. Write "{size}B" or "{size}GiB"')
            for size in (2, 12, "12", 1023, np.int64(12))
        ),
        *(
            (check_budget, size, f'budget={size!r} reads as 1 byte or as everything. Write "1B" or the float 1.0')
            for size in (1, "1", np.int32(1))
        ),
        *((check_budget, size, f'{IS_SHARE}12.0. For bytes write "12B" or "12GiB"') for size in (12.0, np.float32(12))),
        *(
            (check_budget, size, f'{IS_SHARE}{float(size)}. For bytes write an int, or text such as "8GiB"')
            for size in (8e9, -0.5, math.nan, 0.0, np.float64(-0.5))
        ),
        *(
            (check_budget, text, f'budget="{text}" {NO_UNIT.format(share)} "8GiB"')
            for text, share in (("0.5", "0.5"), ("30%", "0.3"), ("12.5 %", "0.125"), (".25", "0.25"))
        ),
    ],
)
def test_what_is_no_size_or_budget_is_refused(read: Callable[..., Any], given: Any, message: str | TypeError) -> None:
    name = {check_bytes: ["min_bytes"], check_budget_bytes: ["budget"]}.get(read, [])

    with pytest.raises(TypeError if isinstance(message, TypeError) else ValueError) as raised:
        read(*name, given)

    assert str(raised.value) == str(message)


@pytest.mark.parametrize(
    ("budget", "read"),
    [
        *((0.5, 0.5), (1.0, 1.0), (1024, 1024), ("12B", 12), ("2KiB", 2048)),
        *((np.float32(0.5), 0.5), (np.int64(2**40), 2**40), (Fraction(1, 4), 0.25)),
    ],
)
def test_budget_that_reads_in_one_way(budget: int | float | str, read: int | float) -> None:
    found = check_budget(budget)

    assert (found, type(found)) == (read, type(read))


def test_byte_view_is_all_bytes_of_the_storage() -> None:
    base = torch.arange(10, dtype=torch.int16)

    seen = byte_view(base[4:6].untyped_storage())

    assert (seen.dtype, tuple(seen.shape)) == (torch.uint8, (20,))
    assert torch.equal(seen.view(torch.int16), base)
    assert storage_key(seen.untyped_storage()) == storage_key(base.untyped_storage())
    for other, num_bytes in ((torch.empty(0), 0), (torch.empty(3, 5, device="meta"), 60)):
        seen = byte_view(other.untyped_storage())
        assert (seen.device, seen.numel()) == (other.device, num_bytes)


def test_no_mode_sees_how_a_tensor_is_laid_over_a_storage() -> None:
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    storage = torch.arange(6, dtype=torch.float32).untyped_storage()

    with Watch():
        found = tensor_over(storage, torch.float32, offset=1, size=(2, 2), stride=(2, 1))

    assert seen == []
    assert found.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3)[:, 1:].t(), torch.full((2,), 1 + 2j).conj(), torch.full((2,), 1 + 2j).conj().imag],
    ids=["strided", "conjugated", "negated"],
)
def test_geometry_is_how_a_tensor_lies_in_its_storage(tensor: torch.Tensor) -> None:
    geometry = Geometry.of(tensor)

    found = geometry.over(tensor.untyped_storage().clone())

    assert Geometry.of(found) == geometry
    assert torch.equal(found, tensor)
