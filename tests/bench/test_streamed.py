"""What `examples/bench/bench_streamed.py` measures: that each way runs, on a small model, with the loss that it says."""

from __future__ import annotations

import math

import pytest
import torch

from memkit.device import ReferenceDevice
from tests.bench.cases import bench_module

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("transformers")


def test_tokens_per_second_with_all_on_the_device_and_with_everything_streamed() -> None:
    setting = bench_module("setting").Setting(device=ReferenceDevice(), steps=2, fast=False, tiny=True, ends_s=math.inf)

    lines = list(bench_module("bench_streamed").lines(setting, "tiny", [(2, 32), (3, 16)], ["plain", "streamed"]))

    assert [line.get("error") for line in lines] == [None] * 4
    assert [(line["way"], line["tokens"]) for line in lines] == [
        ("plain", "2x32"),
        ("plain", "3x16"),
        ("streamed", "2x32"),
        ("streamed", "3x16"),
    ]
    assert [line.get("num_streamed") for line in lines] == [None, None, 3, 3]
    for line, num_tokens in zip(lines, [64, 48, 64, 48], strict=True):
        assert line["tokens_per_s"] == pytest.approx(num_tokens / line["step_s"])
        assert line["model_tflops"] == pytest.approx(6 * line["numel"] * line["tokens_per_s"] / 1e12)


def test_loss_in_pieces_has_the_gradients_of_the_whole() -> None:
    bench = bench_module("bench_streamed")
    torch.manual_seed(0)
    model, tokens = bench.build("tiny").float(), torch.randint(128, (3, 17))

    loss = model(tokens)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    whole = torch.nn.functional.cross_entropy(model.model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())
    whole.backward()

    torch.testing.assert_close(loss, whole)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)
