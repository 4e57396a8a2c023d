"""`memkit.detach`: takes off what was attached to a model, by the model alone."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import memkit
from memkit.core import features
from memkit.device import ReferenceDevice
from tests.profile.cases import Holding

DEVICE = ReferenceDevice()


def _mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)))


def _attach(model: nn.Module, tag: str = "attached") -> memkit.activations.Attachment:
    return memkit.attach(model, memkit.CPUOffload(1.0, tag, min_bytes=0, device=DEVICE))


def _num_hooks(model: nn.Module) -> int:
    return sum(len(value) for module in model.modules() for key, value in module.__dict__.items() if key.endswith("_hooks"))


def _grads(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_takes_an_offload_off_whose_handle_is_lost() -> None:
    model = _mlp()
    expected = _grads(model)
    _attach(model)
    _grads(model)
    memkit.detach(model)

    assert all(map(torch.equal, _grads(model), expected))
    assert memkit.stats("attached").num_iterations == 1
    assert _num_hooks(model) == 0


def test_where_nothing_is_attached_it_says_so() -> None:
    model, removed = _mlp(), _mlp()
    _attach(model)
    _attach(removed, "removed").remove()
    for other in (model[0], copy.deepcopy(model), removed):
        with pytest.raises(
            ValueError, match=r"found none on this Sequential, nor on a module in it\. Pass the model that memkit"
        ):
            memkit.detach(other)
    with pytest.raises(TypeError, match=r"detach needs a torch\.nn\.Module; found str"):
        memkit.detach("model")

    _grads(model)
    assert memkit.stats("attached").num_iterations == 1


def test_second_attach_says_to_detach() -> None:
    model = _mlp()
    _attach(model)
    found = r'found <attached <CPUOffload\(tag="attached"\): .*Call memkit\.detach\(model\) first'
    with pytest.raises(ValueError, match=rf"attach needs a Sequential without such a context; {found}"):
        _attach(model, "second")

    memkit.detach(model)
    _attach(model, "second")
    _grads(model)
    assert memkit.stats("second").num_iterations == 1


def test_lost_layer_offload_goes_on_until_it_is_detached() -> None:
    model = _mlp().requires_grad_(False)
    x = torch.ones(4, 8, requires_grad=True)
    expected = model(x)
    memkit.LayerOffload(model, offload_ratio=1.0, device=DEVICE)
    gc.collect()

    (offload,) = features.attached_to(model)
    assert torch.equal(model(x), expected)
    assert offload.stats().num_fetches > 0
    memkit.detach(model)
    with pytest.raises(ValueError, match="this LayerOffload is closed"):
        offload.__enter__()
    assert torch.equal(model(x), expected)
    assert _num_hooks(model) == 0


def test_layer_offload_over_streamed_weights_says_to_detach() -> None:
    model = _mlp().requires_grad_(False)
    memkit.LayerOffload(model, offload_ratio=1.0, device=DEVICE)
    with pytest.raises(
        ValueError,
        match=r'"0\.0\.weight" is streamed by another LayerOffload already, over a Sequential\. Close that one first: call its '
        r"close\(\), or memkit\.detach\(model\) with the model that it was given",
    ):
        memkit.LayerOffload(model, offload_ratio=1.0, device=DEVICE)

    memkit.detach(model)
    memkit.LayerOffload(model, offload_ratio=1.0, device=DEVICE).close()


def test_detaches_what_streams_inside_and_what_is_attached_around() -> None:
    model = nn.ModuleDict({"body": _mlp().requires_grad_(False), "head": nn.Linear(8, 8)})
    memkit.LayerOffload(model["body"], offload_ratio=1.0, device=DEVICE)
    handles = [_attach(model["head"]), _attach(model["body"][3], "inside")]
    memkit.detach(model)

    assert _num_hooks(model) == 0
    for handle in handles:
        handle.remove()  # does nothing


def test_is_refused_within_a_forward() -> None:
    model = Holding(lambda self, x: memkit.detach(self) or self.layers(x), layers=_mlp()).requires_grad_(False)
    with (
        memkit.LayerOffload(model, offload_ratio=1.0, device=DEVICE),
        pytest.raises(memkit.errors.LayerOffloadError, match="within a forward of the model"),
    ):
        model(torch.ones(4, 8))


def test_holds_no_model_alive() -> None:
    model, streaming = _mlp(), _mlp().requires_grad_(False)
    _attach(model)
    memkit.LayerOffload(streaming, offload_ratio=1.0, device=DEVICE)
    gone = [weakref.ref(model), weakref.ref(streaming)]
    num_attached = len(features._attached)
    del model, streaming
    gc.collect()

    assert [reference() for reference in gone] == [None, None]
    assert len(features._attached) == num_attached - 2


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning", "ignore:.torch.jit.script. is:DeprecationWarning")
def test_model_with_a_scripted_part() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.GELU())
    _attach(model)
    memkit.detach(model)

    assert _num_hooks(model) == 0
