"""What holds for each bench."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import memkit
from memkit.bench import bench_offload, bench_remat
from memkit.device import ReferenceDevice, cuda_is_available
from tests.bench.cases import assert_fails, square_layers

pytestmark = pytest.mark.full

OF_SAVED_TENSORS: dict[str, Callable[[], object]] = {
    "offload": lambda: bench_offload(square_layers(512), [1], ReferenceDevice(), num_steps=1, num_warmup=1),
    "remat": lambda: bench_remat(square_layers(64), [0.5], ReferenceDevice(), num_steps=1, num_warmup=1, min_bytes=0),
}


@pytest.mark.parametrize("bench", OF_SAVED_TENSORS)
def test_leaves_no_tag_behind(bench: str) -> None:
    OF_SAVED_TENSORS[bench]()

    with pytest.raises(ValueError, match='found none under "memkit bench"'):
        memkit.stats("memkit bench")


@pytest.mark.skipif(cuda_is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", ["offload", "remat", "layers"])
def test_command_measures_nothing_without_a_gpu(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", bench, "torchvision:resnet18", "--input", "2x3x64x64"]

    assert_fails(capsys, arguments, "nothing was measured: there is no CUDA device here")
