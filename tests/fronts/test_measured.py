"""What is predicted for an H200, beside what it has measured: plain steps and checkpointed blocks, the medians of many."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.fronts.checkpoints import checkpoint_curve
from memkit.plan.asked import problem_of, trace_of
from memkit.plan.budget import Problem
from memkit.plan.gpus import GPUS

pytestmark = pytest.mark.full
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    forward_s: float
    backward_s: float
    peak_mib: int
    checkpointed_share: float
    checkpointed_peak_mib: int


def resnet50() -> tuple[nn.Module, Tensor]:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        return models.resnet50(), torch.empty(256, 3, 224, 224)


class LlamaWithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
        config = transformers.LlamaConfig(vocab_size=32000, use_cache=False, **shape)
        self.inner = transformers.LlamaForCausalLM(config).bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner.model(input_ids=tokens)[0]
        return nn.functional.cross_entropy(self.inner.lm_head(hidden).flatten(0, 1), tokens.flatten())


def llama() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return LlamaWithLoss(), torch.zeros(8, 2048, dtype=torch.long)


MODELS = {
    "ResNet-50, batch 256": (resnet50, Measured(39.3e-3, 76.2e-3, 21347, 1.292, 9043)),
    "Llama 0.95B, 8 x 2048": (llama, Measured(81.1e-3, 159.6e-3, 28710, 1.27, 6164)),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[Problem, Measured]:
    make, measured = MODELS[request.param]
    model, inputs = make()
    report = memkit.profile_memory(model.train(), inputs, device="meta", backward=True, trace=True, print_table=False)
    return problem_of(trace_of(report), GPUS["H200"], None), measured


def test_seconds_of_the_plain_step(case: tuple[Problem, Measured]) -> None:
    problem, measured = case
    trace, gpu = problem.trace, problem.gpu
    forward_s = sum(gpu.seconds(op, is_backward=False) for op in trace.ops[: trace.num_forward_ops])

    assert forward_s == pytest.approx(measured.forward_s, rel=0.04)
    assert problem.plain_s - forward_s == pytest.approx(measured.backward_s, rel=0.03)
    assert problem.plain_s == pytest.approx(measured.forward_s + measured.backward_s, rel=0.02)


def test_peak_of_the_plain_step(case: tuple[Problem, Measured]) -> None:
    problem, measured = case

    assert problem.plain_peak_bytes == pytest.approx(measured.peak_mib * MIB, rel=0.005)


def test_all_blocks_checkpointed(case: tuple[Problem, Measured]) -> None:
    problem, measured = case
    found = checkpoint_curve(problem)[-1]

    assert found.num_blocks == 16
    assert found.step_s / problem.plain_s == pytest.approx(measured.checkpointed_share, rel=0.01)
    assert found.peak_bytes == pytest.approx(measured.checkpointed_peak_mib * MIB, rel=0.015)
