"""A small language model, its data, and features that do something to it on the reference device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.device import ReferenceDevice

MARKS = [
    pytest.mark.integrations,
    # others' warnings are theirs; memkit's own are errors
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings(
        "error:.*(memkit|Memkit|MemoryBudget|CPUOffload|Rematerialize|LayerOffload|StateOffload|attach)"
    ),
]
VOCABULARY, LENGTH = 64, 16
MISSING = 'needs the libraries of the extra: pip install -e ".[integrations]"'

Make = Callable[[nn.Module], list[object]]
"""Makes the features for a model."""


def llama(num_layers: int = 4) -> nn.Module:
    """Return the same Llama each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


def token_rows(num_rows: int = 14) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (LENGTH,), generator=generator) for _ in range(num_rows)]


def tiny_budget(model: nn.Module) -> list[object]:
    return [memkit.MemoryBudget("200KiB", tag="tiny", min_bytes=0, device=ReferenceDevice())]


def tiny_offload(model: nn.Module) -> list[object]:
    return [memkit.CPUOffload(1.0, tag="tiny", min_bytes=0, device=ReferenceDevice())]


def tiny_remat(model: nn.Module) -> list[object]:
    return [memkit.Rematerialize(0.5, tag="tiny", min_bytes=0, device=ReferenceDevice())]


def tiny_layers(model: nn.Module) -> list[object]:
    return [memkit.LayerOffload(model, offload_ratio=1.0, device=ReferenceDevice())]


def tiny_layers_and_offload(model: nn.Module) -> list[object]:
    return [*tiny_layers(model), *tiny_offload(model)]


def tiny_states(model: nn.Module) -> list[object]:
    return [partial(memkit.StateOffload, device=ReferenceDevice())]


def in_backward(model: nn.Module) -> list[object]:
    return [partial(memkit.StateOffload, when="backward", device=ReferenceDevice())]


def tiny_states_and_remat(model: nn.Module) -> list[object]:
    return [*tiny_states(model), *tiny_remat(model)]


def tiny_layers_and_remat(model: nn.Module) -> list[object]:
    return [*tiny_layers(model), *tiny_remat(model)]


FEATURES: dict[str, Make] = {
    "MemoryBudget": tiny_budget,
    "CPUOffload": tiny_offload,
    "Rematerialize": tiny_remat,
    "LayerOffload": tiny_layers,
    "LayerOffload and CPUOffload": tiny_layers_and_offload,
    "StateOffload": tiny_states,
    "StateOffload and Rematerialize": tiny_states_and_remat,
}

EVERY_FEATURE = pytest.mark.parametrize(
    "make",
    # a plan takes seconds to be made
    [pytest.param(make, marks=[pytest.mark.slow] * (make is tiny_budget)) for make in FEATURES.values()],
    ids=FEATURES.keys(),
)


def assert_same_weights(model: nn.Module, plain: nn.Module) -> None:
    """See that two models have the same weights under the same names, bit for bit."""
    found, expected = model.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    differing = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert differing == []


def assert_has_worked(figures: dict[str, float]) -> None:
    """See in a callback's figures that each of its features has done something."""
    rooms = {name.split("/")[1] for name in figures}
    assert rooms
    moved = ("memkit/tiny/moved_gib", "memkit/tiny/recomputed_gib", "memkit/layers/moved_in_gib", "memkit/states/moved_in_gib")
    assert rooms == {name.split("/")[1] for name in moved if figures.get(name, 0) > 0}
