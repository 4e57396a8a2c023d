"""Which modules of a model are found to be its layers, and which of these stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
import torchvision
from torch import Tensor, nn

import memkit
from memkit.device import ReferenceDevice
from memkit.plan import LayerCosts, plan_streamed_ratio
from memkit.plan.residency import predict_step
from memkit.weights.selection import StepTimes, find_layers, plan_measured
from tests.plan.budget.steps import MIB


def _found(model: nn.Module) -> list[str]:
    """Return the lists whose elements are found, with the number of elements: "layers x 12"."""
    lists = [name.rpartition(".")[0] for name in find_layers(model, None)]
    return [f"{name} x {lists.count(name)}".lstrip() for name in dict.fromkeys(lists)]


def _on_meta(build: Callable[[], nn.Module]) -> list[str]:
    with torch.device("meta"):
        return _found(build())


class Block(nn.Module):
    """A block of a stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return [batch, width]."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Blocks behind what changes the width."""

    def __init__(self, before: int, width: int, depth: int, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.LayerNorm(before), nn.Linear(before, width))
        blocks = [Block(width) for _ in range(depth)]
        self.blocks = kind(*blocks) if kind is nn.Sequential else kind(blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, before], return [batch, width]."""
        x = self.downsample(x)
        for block in self.blocks:
            x = block(x)
        return x


class Staged(nn.Module):
    """As the models of timm are: `stages` in a Sequential, each with its `blocks`."""

    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 9, 3),
        widths: Sequence[int] = (16, 32, 64, 128),
        kind: Callable[..., nn.Module] = nn.Sequential,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(8, widths[0])
        stages = [Stage(*sizes, depth, kind) for sizes, depth in zip(pairwise((widths[0], *widths)), depths, strict=True)]
        self.stages = kind(*stages) if kind is nn.Sequential else kind(stages)
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        """Take [batch, 8], return [batch, 4]."""
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.parametrize("depths", [(3, 3, 9, 3), (2, 2, 6, 2), (2, 2, 2, 2), (1, 2, 8, 1)])
def test_blocks_are_found_in_stages(depths: tuple[int, ...], kind: Callable[..., nn.Module]) -> None:
    model = Staged(depths, kind=kind)

    assert _found(model) == [f"stages.{index}.blocks x {depth}" for index, depth in enumerate(depths)]


def test_lists_in_a_list_are_stages_whatever_their_sizes() -> None:
    """No forward calls a ModuleList."""
    model = nn.ModuleList(nn.ModuleList(Block(16) for _ in range(2)) for _ in range(12))

    assert _found(model) == [f"{index} x 2" for index in range(12)]


def test_layers_are_not_taken_apart() -> None:
    """Experts, heads and the like are in lists as stages' blocks are, but what holds them streams as well as they would."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block(16) for _ in range(8))

    assert _found(nn.ModuleList(Mixture() for _ in range(8))) == ["x 8"]


def test_few_layers_are_not_taken_apart_for_a_part_of_them() -> None:
    """As a small GPT is whose attention has a list of heads."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 4)) for _ in range(4))
            self.mlp = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    assert _found(nn.Sequential(*(Layer() for _ in range(3)))) == ["x 3"]


def test_layers_that_free_more_come_before_longer_lists() -> None:
    model = nn.Module()
    model.scales = nn.ModuleList(nn.Linear(2, 2) for _ in range(20))
    model.body = nn.Sequential(*(Block(64) for _ in range(6)))

    assert _found(model) == ["body x 6"]


def _resnet_blocks(*depths: int) -> list[str]:
    return [f"layer{stage} x {depth}" for stage, depth in enumerate(depths, start=1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", _resnet_blocks(2, 2, 2, 2)),
        ("resnet50", _resnet_blocks(3, 4, 6, 3)),
        ("resnet101", _resnet_blocks(3, 4, 23, 3)),
        ("vit_b_16", ["encoder.layers x 12"]),
        ("convnext_tiny", ["features.1 x 3", "features.3 x 3", "features.5 x 9", "features.7 x 3"]),
        ("swin_t", ["features.1 x 2", "features.3 x 2", "features.5 x 6", "features.7 x 2"]),
        ("maxvit_t", ["blocks.0.layers x 2", "blocks.1.layers x 2", "blocks.2.layers x 5", "blocks.3.layers x 2"]),
        ("efficientnet_b0", [f"features.{stage} x {depth}" for stage, depth in zip(range(2, 7), (2, 2, 3, 3, 4), strict=True)]),
    ],
)
def test_torchvision(name: str, expected: list[str]) -> None:
    assert _on_meta(lambda: torchvision.models.get_model(name)) == expected


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("Llama", {"num_hidden_layers": 12}, ["layers x 12"]),
        ("GPT2", {}, ["h x 12"]),
        ("Bert", {}, ["encoder.layer x 12"]),
        ("T5", {"num_decoder_layers": 3}, ["encoder.block x 6", "decoder.block x 3"]),
        ("Whisper", {}, ["encoder.layers x 4", "decoder.layers x 4"]),
        ("CLIP", {}, ["text_model.encoder.layers x 12", "vision_model.encoder.layers x 12"]),
        ("Swin", {}, [f"encoder.layers.{stage}.blocks x {depth}" for stage, depth in enumerate((2, 2, 6, 2))]),
        ("ConvNext", {}, [f"encoder.stages.{stage}.layers x {depth}" for stage, depth in enumerate((3, 3, 9, 3))]),
        ("ResNet", {}, [f"encoder.stages.{stage}.layers x {depth}" for stage, depth in enumerate((3, 4, 6, 3))]),
    ],
)
def test_transformers(name: str, options: dict[str, int], expected: list[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**options)

    found = _on_meta(lambda: getattr(transformers, f"{name}Model")(config))

    assert found == expected


def test_blocks_of_stages_stream_and_free() -> None:
    torch.manual_seed(0)
    model, x = Staged().requires_grad_(False), torch.randn(4, 8, requires_grad=True)
    out = model(x)
    out.square().sum().backward()
    expected, x.grad = x.grad, None
    with memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice()) as offload:
        for _ in range(2):
            found = model(x)
            found.square().sum().backward()
            assert torch.equal(found, out)
            assert torch.equal(x.grad, expected)
            x.grad = None

    assert offload.plan.freed_bytes > 0


def _times(forward_s: float = 1.0, peak_bytes: int | None = 20 * MIB, speed: float = 4.0 * MIB) -> StepTimes:
    return StepTimes(
        forward_s={str(index): forward_s for index in range(12)},
        backward_s={str(index): 2 * forward_s for index in range(12)},
        taken_s=1.0,
        h2d_bytes_per_s=speed,
        peak_bytes=peak_bytes,
    )


def _chosen(times: StepTimes, *, capacity_bytes: int | None = None, train: str = "frozen") -> int:
    """Return how many of twelve layers of 1 MiB stream."""
    costs = [
        LayerCosts(name=name, num_bytes=MIB, forward_s=times.forward_s[name], backward_s=times.backward_s[name])
        for name in times.forward_s
    ]
    all_stream = plan_streamed_ratio(costs, 1.0, num_slots=3)
    return len(plan_measured(costs, times, all_stream, train=train, num_slots=3, capacity_bytes=capacity_bytes).streamed)


def test_most_that_hides_is_chosen() -> None:
    assert _chosen(_times()) == 12
    slow = _chosen(_times(speed=MIB / 2))
    assert 0 < slow < 12
    costs = [LayerCosts(name=name, num_bytes=MIB, forward_s=1.0, backward_s=2.0) for name in _times().forward_s]
    plan = plan_streamed_ratio(costs, slow / 12, num_slots=3, link_bytes_per_s=MIB / 2)
    streamed = [index for index, layer in enumerate(costs) if layer.name in plan.streamed]
    assert predict_step(costs, streamed, plan.slot_bytes, MIB / 2).total_s <= 1.01 * 36


@pytest.mark.parametrize(("train", "num_streamed"), [("frozen", 8), ("host", 11)])
def test_least_that_fits_is_chosen_where_there_is_no_room(train: str, num_streamed: int) -> None:
    times = _times(speed=MIB / 100)  # next to nothing hides
    assert _chosen(times, train=train) < 4
    # 20 MiB with 3 slots in it: 4 MiB are left, for four layers, or for one with its gradient and its optimizer's state
    assert _chosen(times, train=train, capacity_bytes=int(24.01 * MIB / 0.95)) == num_streamed
    assert _chosen(times, train=train, capacity_bytes=10 * MIB) == 12
