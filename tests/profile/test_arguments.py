"""The arguments, models and surroundings that a profile refuses, by name, on a device and without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
from memkit import profile_memory
from memkit.device import CpuDevice, Device, ReferenceDevice
from memkit.errors import ProfileError
from memkit.profile import MemoryReport, find_report
from tests.profile.cases import Function

LINEAR, X = nn.Linear(2, 2), torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("model", "x", "options", "error", "message"),
    [
        (lambda x: x, X, {}, TypeError, "profile_memory needs a torch.nn.Module; found function"),
        (LINEAR, X, {"loss_fn": 3}, TypeError, "loss_fn must be callable; found int"),
        (LINEAR, X, {"target": "tpu"}, ValueError, "target must be one of 'cuda', 'cpu'; found 'tpu'"),
        (LINEAR, X, {"tag": ""}, ValueError, "tag must be a name; found ''"),
        (LINEAR, X, {"warmup": -1}, ValueError, "warmup must be a number of runs, 0 or more; found -1"),
        (LINEAR, X, {"depth": -1}, ValueError, "depth must be a whole number, 0 or more; found -1"),
        (LINEAR, X, {"sort_by": "size"}, ValueError, "sort_by must be one of 'activation'"),
        (LINEAR, X, {"trace": 1}, ValueError, "trace is True or False; found 1"),
        (LINEAR, X, {"device": "nowhere"}, ValueError, 'device must be the name of a torch.device, such as "cuda:1"; found'),
        (LINEAR, X, {"device": "xpu"}, ValueError, 'memkit runs on "cpu" and "cuda"; found "xpu"'),
        (LINEAR, X.to("meta"), {}, ValueError, "the model is on cpu and its inputs are on meta; move the inputs"),
        (
            nn.Linear(2, 2, device="meta"),
            X.to("meta"),
            {"device": "cpu"},
            ValueError,
            "device must be where the model is (meta)",
        ),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            X,
            {},
            ProfileError,
            "the model is spread over cpu, meta",
        ),
        (nn.LazyLinear(4), X, {}, ProfileError, "weight has no shape yet; run the model once"),
        (nn.ReLU(), X, {"backward": True}, ProfileError, "backward=True needs a tensor to start from"),
    ],
)
def test_what_is_refused(model: nn.Module, x: Tensor, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        profile_memory(model, x, print_table=False, **options)

    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("device", [None, "meta"])
def test_input_that_the_model_refuses_keeps_its_error(device: str | None) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))

    with pytest.raises(RuntimeError) as raised:
        profile_memory(model, torch.zeros(2, 3), device=device)

    assert "multiplied" in str(raised.value) or "reduction dim" in str(raised.value)
    assert raised.value.__notes__[0] == "memkit: raised in 1 (Linear)"


def _raise(error: Exception) -> Callable[..., Any]:
    def raises(*_: object) -> None:
        raise error

    return raises


def test_no_grad_is_refused() -> None:
    with torch.no_grad(), pytest.raises(ProfileError, match="grad mode is off"):
        profile_memory(LINEAR, X)


@pytest.mark.parametrize(
    ("error", "of_loss", "note"),
    [
        (ZeroDivisionError("mine"), True, "memkit: raised in the loss"),
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            False,
            'memkit: out of memory in 0 (Function); the meta device needs none (device="meta", --device meta)',
        ),
        (ValueError("unknown column from the 'Meta' backend"), False, "memkit: raised in 0 (Function)"),
    ],
)
def test_error_of_the_model_or_the_loss_stays_what_it_is_with_a_note(error: Exception, of_loss: bool, note: str) -> None:
    model = nn.Sequential(nn.Identity() if of_loss else Function(_raise(error)))

    with pytest.raises(type(error)) as raised:
        profile_memory(model, torch.zeros(1), loss_fn=_raise(error) if of_loss else None)

    assert raised.value is error
    assert raised.value.__notes__ == [note]
    assert find_report("default") is None


@pytest.mark.parametrize("loss", [lambda y: y, lambda y: 1.0, lambda y: None])
def test_backward_from_a_loss_that_is_no_number(loss: object) -> None:
    with pytest.raises(ValueError, match="loss_fn must return a tensor with one element; found"):
        profile_memory(nn.Linear(2, 2), torch.zeros(3, 2), loss_fn=loss, backward=True)


def test_report_is_filed_under_its_tag_and_printed_unless_that_is_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Linear(2, 2), torch.zeros(1, 2)

    report = profile_memory(model, x)
    printed = capsys.readouterr().out
    mine = profile_memory(model, x, tag="mine", print_table=False)

    assert printed == str(report) + "\n"
    assert capsys.readouterr().out == ""
    assert (find_report("mine"), find_report("default"), find_report("other")) == (mine, report, None)


def test_keyword_arguments_and_nested_inputs_are_inputs() -> None:
    nested = Function(lambda pair, *, scale: {"out": pair[0] * pair[1] * scale})
    *pair, scale = (torch.randn(4, requires_grad=True) for _ in range(3))

    report = profile_memory(nested, tuple(pair), kwargs={"scale": scale}, backward=True, print_table=False)

    assert report.input_bytes == 48
    assert report.modules[0].input_shapes == ((4,), (4,), (4,))
    assert report.modules[0].output_shapes == ((4,),)


def test_fingerprint_tells_models_apart() -> None:
    def fingerprint(model: nn.Module) -> str:
        return profile_memory(model, torch.zeros(1, 2), print_table=False).run.fingerprint

    assert fingerprint(nn.Linear(2, 2)) == fingerprint(nn.Linear(2, 2)) != fingerprint(nn.Linear(2, 3))


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), CpuDevice(), ReferenceDevice()])
@pytest.mark.parametrize("model", [nn.Linear(4, 4), nn.ReLU()])
def test_device_may_be_the_one_that_the_model_or_else_the_input_is_on(
    model: nn.Module, device: str | torch.device | Device | None
) -> None:
    assert profile_memory(model, torch.randn(2, 4), device=device, print_table=False).run.device == "cpu"


Context = Callable[[], AbstractContextManager[object]]
Profile = Callable[[nn.Module], MemoryReport]


def _offload(tag: str = "around") -> memkit.CPUOffload:
    return memkit.CPUOffload(1.0, tag, device=ReferenceDevice(), min_bytes=0)


def _remat() -> memkit.Rematerialize:
    return memkit.Rematerialize(0.5, "around", min_bytes=0)


AROUND: dict[str, tuple[Context, str]] = {
    "CPUOffload": (_offload, r'found CPUOffload \(tag "around"\) around it.*Profile the model outside of it'),
    "Rematerialize": (_remat, r'found Rematerialize \(tag "around"\) around it'),
    "save_on_cpu": (save_on_cpu, "found a pair of saved-tensor hooks .*save_on_cpu.* around it"),
}


class InItsForward(nn.Module):
    """Enters a context in its forward."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.inner, self.context = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            return self.inner(x)


@pytest.fixture(params=[None, "meta"])
def profile(request: pytest.FixtureRequest) -> Profile:
    """Return a profile of a model, where it is or without data."""
    return lambda model: memkit.profile_memory(
        model, torch.randn(4, 8), backward=True, device=request.param, tag="found", print_table=False
    )


@pytest.fixture(autouse=True)
def _fresh_tags() -> Iterator[None]:
    yield
    for tag in ("around", "attached"):
        memkit.reset(tag)


@pytest.mark.parametrize("around", AROUND)
def test_inside_of_a_context_is_refused(around: str, profile: Profile) -> None:
    make, message = AROUND[around]
    with make(), pytest.raises(ProfileError, match=message):
        profile(nn.Linear(8, 8))

    assert find_report("found") is None


@pytest.mark.parametrize("is_whole", [True, False])
def test_attached_model_is_refused_until_the_handle_is_removed(is_whole: bool, profile: Profile) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = memkit.attach(model if is_whole else model[1], _offload("attached"))
    with pytest.raises(ProfileError, match=r'CPUOffload \(tag "attached"\), which the model enters.*before memkit\.attach'):
        profile(model)
    model(torch.randn(4, 8)).sum().backward()

    assert memkit.stats("attached").num_iterations == 1
    assert all(tensor.device.type == "cpu" and torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    handle.remove()
    assert profile(model).activation_bytes == 3 * 4 * 8 * 4


@pytest.mark.parametrize("context", [_offload, _remat])
def test_context_in_the_forward_is_refused(context: Context, profile: Profile) -> None:
    model = nn.Sequential(InItsForward(context))
    with pytest.raises(ProfileError, match=r'tag "around"\), which the model enters in its forward'):
        profile(model)
    with context():
        model[0].inner(torch.randn(4, 8)).sum().backward()  # it can be entered again


def test_context_that_does_nothing_without_grad_is_let_be(profile: Profile) -> None:
    class Frozen(InItsForward):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = super().forward(x)
            return self.inner(x)

    assert profile(Frozen(_offload)).activation_bytes == 2 * 4 * 8 * 4


def test_smallest_budget_is_refused_there_as_well() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    with _offload(), pytest.raises(ProfileError, match=r'found CPUOffload \(tag "around"\) around it'):
        memkit.Rematerialize.min_budget(model, x, min_bytes=0)
    memkit.attach(model, _offload("attached"))
    with pytest.raises(ProfileError, match=r'CPUOffload \(tag "attached"\), which the model enters'):
        memkit.Rematerialize.min_budget(model, x, min_bytes=0)


def test_inside_of_a_checkpointed_function_is_refused(profile: Profile) -> None:
    def profiles(inputs: Tensor) -> Tensor:
        profile(nn.Linear(8, 8))
        return inputs

    with pytest.raises(memkit.errors.ProfileError, match=r"found torch\.utils\.checkpoint around it"):
        checkpoint(profiles, torch.ones(1, requires_grad=True), use_reentrant=False)
