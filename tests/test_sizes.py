from __future__ import annotations

import pytest
import torch
from torch import nn

from memkit.sizes import format_mib, storage_bytes, storage_key, storages_of, unique_storages


def test_views_share_one_storage() -> None:
    base = torch.zeros(10)

    assert storage_bytes([base, base[2:], base.view(2, 5)]) == 40


def test_view_counts_the_whole_storage() -> None:
    assert storage_bytes([torch.zeros(10)[:1]]) == 40


def test_expanded_tensor_counts_what_is_there() -> None:
    assert storage_bytes([torch.zeros(1).expand(1000)]) == 4


def test_parameter_and_its_transpose_are_one() -> None:
    linear = nn.Linear(3, 5, bias=False)

    assert set(unique_storages([linear.weight])) == set(unique_storages([linear.weight.t()]))


def test_sparse_tensor_has_the_storages_of_its_parts() -> None:
    sparse = torch.eye(4).to_sparse()

    assert storage_bytes([sparse]) == 2 * 4 * 8 + 4 * 4


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_tensor_has_the_storages_of_its_parts() -> None:
    assert len(list(storages_of(torch.eye(4).to_sparse_csr()))) == 3


def test_wrapper_subclass_has_the_storages_of_its_inner_tensors() -> None:
    values, offsets = torch.zeros(6, 2), torch.tensor([0, 2, 6])

    nested = torch.nested.nested_tensor_from_jagged(values, offsets)

    assert set(unique_storages([values, offsets])) <= set(unique_storages([nested]))


def test_meta_tensors_have_bytes() -> None:
    assert storage_bytes([torch.empty(256, 4, device="meta", dtype=torch.bfloat16)]) == 2048


def test_key_is_of_the_storage_not_of_the_address() -> None:
    first, second = torch.empty(0), torch.empty(0)

    assert first.data_ptr() == second.data_ptr()
    assert storage_key(first.untyped_storage()) != storage_key(second.untyped_storage())


def test_mib_are_binary() -> None:
    assert format_mib(20974 * 1024**2) == "20974.00 MiB"
