"""The `StateOffload` that callbacks make over the optimizers of a training: when, over what, and what they refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.device import ReferenceDevice
from memkit.integrations.features import Features, inside
from memkit.integrations.refusals import Loop, refuse

STATES = partial(memkit.StateOffload, device=ReferenceDevice())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)])


def _optimizer(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW((_model() if model is None else model).parameters(), lr=0.01)


def _train(model: nn.Module, optimizer: Any, num_steps: int = 2) -> None:
    for step in range(num_steps):
        torch.manual_seed(step)
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def _opened(features: Features) -> list[memkit.StateOffload]:
    assert features.states is not None
    return features.states.opened


# What is given


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([STATES, memkit.StateOffload], ValueError, "Callback needs at most one StateOffload; found two. Leave one of them"),
        ([partial(memkit.StateOffload, _optimizer())], TypeError, "a functools.partial that has one already, AdamW. Leave"),
        ([partial(memkit.StateOffload, budget=1)], TypeError, "Callback: StateOffload got an unexpected keyword.* 'budget'"),
        ([partial(memkit.StateOffload, disk="disk")], TypeError, "disk is a memkit.Disk, such as"),
        ([partial(memkit.StateOffload, when="later")], ValueError, "when is 'step' or 'backward'; found 'later'"),
        ([partial(memkit.LayerOffload, offload_ratio=1.0)], TypeError, "Callback needs features such as .* found functools"),
    ],
)
def test_what_makes_no_state_offload_is_named(given: list[object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Features("Callback", given)


def test_one_that_was_made_already_is_refused() -> None:
    with (
        memkit.StateOffload(_optimizer(), device=ReferenceDevice()) as states,
        pytest.raises(TypeError, match=r"makes the StateOffload itself.*Pass memkit.StateOffload, or functools.partial"),
    ):
        Features("Callback", [states])


# When it is there, and over what


def test_options_are_those_of_the_partial() -> None:
    features = Features("Callback", [partial(STATES, device_budget="1MiB", master=None)])

    features.begin_states([_optimizer()])

    assert _opened(features)[0].plan.is_empty
    features.close()


def test_it_is_over_the_optimizer_inside() -> None:
    optimizer = _optimizer()
    features = Features("Callback", [STATES])

    features.begin_states([_Wrapping(_Wrapping(optimizer))])

    assert _opened(features)[0].optimizer is optimizer is inside(optimizer)
    features.close()


def test_states_are_in_host_memory_until_the_end() -> None:
    model, plain = _model(), _model()
    optimizer, plain_optimizer = _optimizer(model), _optimizer(plain)
    features = Features("Callback", [STATES])

    features.begin_states([optimizer])
    assert features.is_on
    _train(model, optimizer)
    moved = features.figures()["memkit/states/moved_out_gib"]
    features.end_states()
    _train(model, optimizer)  # by itself again
    _train(plain, plain_optimizer, 2)
    _train(plain, plain_optimizer, 2)

    assert not features.is_on
    assert moved == features.figures()["memkit/states/moved_out_gib"] > 0
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_beginning_again_keeps_that_of_the_same_optimizer_and_closes_others() -> None:
    optimizer, other = _optimizer(), _optimizer()
    features = Features("Callback", [STATES])
    features.begin_states([optimizer])
    (made,) = _opened(features)

    features.begin_states([_Wrapping(optimizer)])
    assert _opened(features) == [made]
    features.begin_states([other])

    assert [states.optimizer for states in _opened(features)] == [other]
    assert "closed" in repr(made)
    features.close()
    assert _opened(features) == []


def test_what_an_earlier_run_has_left_is_closed_and_the_users_own_is_not() -> None:
    optimizer = _optimizer()
    earlier, later = Features("Callback", [STATES]), Features("Callback", [STATES])
    earlier.begin_states([optimizer])

    later.begin_states([optimizer])
    assert "closed" in repr(_opened(earlier)[0])
    later.close()
    with STATES(optimizer) as own, pytest.raises(ValueError, match="has a StateOffload already"):
        later.begin_states([optimizer])

    assert own.optimizer is optimizer


def test_none_is_left_where_one_of_several_is_refused() -> None:
    optimizer = _optimizer()
    features = Features("Callback", [STATES])

    with pytest.raises(ValueError, match="needs a closure"):
        features.begin_states([optimizer, torch.optim.LBFGS(_model().parameters())])

    assert _opened(features) == []
    STATES(optimizer).close()


def test_none_is_left_where_another_feature_cannot_be_attached() -> None:
    model = _model()
    handle = memkit.attach(model, memkit.CPUOffload(1.0, "mine", device=ReferenceDevice()))
    features = Features("Callback", [STATES, memkit.CPUOffload(1.0, "other", device=ReferenceDevice())])
    features.begin_states([_optimizer(model)])

    with pytest.raises(ValueError, match="attach needs a Sequential without such a context"):
        features.begin(model, None)

    assert _opened(features) == []
    handle.remove()


def test_training_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="Callback needs the optimizer of the training for its StateOffload; the trainer has"):
        Features("Callback", [STATES]).begin_states([])


# What does not go together


@pytest.mark.parametrize(
    ("options", "loop", "message"),
    [
        ({}, {"shards": "fsdp=..."}, "moves the optimizer's states, and so does fsdp=.... Use one of the two"),
        ({"overlap_forward": True}, {}, r"overlap_forward=True needs wait\(\) ahead of .* trainers read them to save. Leave"),
        ({"when": "backward"}, {"clips": "gradient_clip_val=1"}, "so that gradient_clip_val=1 finds none. Leave when= out"),
        ({"when": "backward"}, {"scales": "fp16=True"}, "fp16=True scales them. Use bfloat16"),
        ({"when": "backward"}, {"accumulates": "accumulate_grad_batches=2"}, "accumulate_grad_batches=2 adds them up over sev"),
        ({"when": "backward"}, {"num_processes": 2}, "before 2 processes have reduced them. Leave when= out"),
    ],
)
def test_loop_that_states_do_not_go_with_is_refused(options: dict[str, Any], loop: dict[str, Any], message: str) -> None:
    features = Features("Callback", [partial(STATES, **options)])

    with pytest.raises(ValueError, match=message):
        refuse(features, Loop(**{"device": torch.device("cpu"), **loop}))


def test_loops_that_clip_scale_accumulate_and_reduce_are_not_refused() -> None:
    loop = Loop(device=torch.device("cpu"), clips="a norm", scales="fp16=True", accumulates="two", num_processes=2)

    refuse(Features("Callback", [STATES]), loop)


def test_layers_that_are_trained_in_host_memory_are_refused_and_frozen_ones_are_not() -> None:
    loop, model = Loop(device=torch.device("cpu")), _model()
    stream = partial(memkit.LayerOffload, offload_ratio=1.0, device=ReferenceDevice())
    with (
        stream(model, train="host") as trained,
        pytest.raises(ValueError, match=r'train="host" has the states of streamed layers itself.*Leave the StateOffload out'),
    ):
        refuse(Features("Callback", [trained, STATES]), loop)

    with stream(model.requires_grad_(False)) as frozen:
        refuse(Features("Callback", [frozen, STATES]), loop)


# In Accelerate


def test_gradients_that_accelerate_scales_are_stepped_as_without() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.Accelerator(cpu=True)
    models = [_model(), _model()]
    for model, given in zip(models, ([], [STATES]), strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        wrapped = accelerate.optimizer.AcceleratedOptimizer(_optimizer(model), scaler=scaler)
        features = Features("Callback", [*given, memkit.no_offload()])
        features.begin_states([wrapped])
        for step in range(3):
            torch.manual_seed(step)
            scaler.scale(model(torch.randn(4, 16)).square().mean() * (float("inf") if step == 1 else 1.0)).backward()
            wrapped.step()
            assert wrapped.step_was_skipped == (step == 1)
            wrapped.zero_grad()
        features.close()

    assert all(torch.equal(one, other) for one, other in zip(*(model.parameters() for model in models), strict=True))
