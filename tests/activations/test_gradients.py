"""Nothing changes but where bytes are: gradients are those of the plain run, bit for bit, in every order of events."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.device import Device
from tests.activations.cases import COMPUTATIONS, assert_same_bits, gradients, inputs_on, mlp, skips
from tests.activations.conftest import Offload
from tests.models import CASES


@pytest.mark.parametrize("window_bytes", [0, None])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations(name: str, ratio: float, window_bytes: int | None, device: Device, offloading: Offload) -> None:
    computation = COMPUTATIONS[name]
    plain = gradients(computation, device.torch_device, nullcontext)

    for _ in range(2):  # without a plan, and with one
        found = gradients(computation, device.torch_device, lambda: offloading(ratio, "computation", window_bytes=window_bytes))

        assert_same_bits(found, plain)
    assert memkit.stats("computation").live_records == 0


def _step(model: nn.Module, inputs: list[Tensor], context: AbstractContextManager[object]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    with context:
        output = model(*inputs)
    output = output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    output.float().square().mean().backward()
    return [output.detach(), *[param.grad for param in model.parameters() if param.grad is not None]]


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("name", CASES)
def test_models(name: str, device: Device, offloading: Offload) -> None:
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)  # some have operators that are not
    case = CASES[name]
    model, inputs = case.model().to(device.torch_device), [x.to(device.torch_device) for x in case.inputs()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(context: AbstractContextManager[object]) -> list[Tensor]:
        model.load_state_dict(buffers, strict=False)
        return _step(model, inputs, context)

    num_plain = 5 if device.torch_device.type == "cuda" else 2
    plain = [run(nullcontext()) for _ in range(num_plain)]
    noise = [max(float((run[index] - plain[0][index]).abs().max()) for run in plain) for index in range(len(plain[0]))]
    for _ in range(3):
        found = run(offloading(0.7, "model"))

        if any(noise):  # the plain runs differ among themselves, as is known of some operators on CUDA
            assert device.torch_device.type == "cuda"
            for one, other, bound in zip(found, plain[0], noise, strict=True):
                assert float((one - other).abs().max()) <= 2 * bound
        else:
            assert_same_bits(found, plain[0])


def test_backward_inside_the_context(device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        with context:
            for _ in range(3):
                mlp(x, w).sum().backward()
        return [x.grad, w.grad]

    assert_same_bits(run(offloading(1.0, "inside", window_bytes=0)), run(nullcontext()))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_several_graphs_alive(order: tuple[int, ...], device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        losses = []
        for factor in range(3):
            with context:
                losses.append(mlp(x * factor, w).square().sum())
        for index in order:
            losses[index].backward()
        return [x.grad, w.grad]

    for _ in range(2):
        assert_same_bits(run(offloading(0.8, "several")), run(nullcontext()))


def test_one_forward_one_backward_in_turn(device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        alive: list[Tensor] = []
        for factor in range(6):
            with context:
                alive.append(skips(x + factor, w).sum())
            if len(alive) == 3:
                alive.pop(0).backward()
        for loss in alive:
            loss.backward()
        return [x.grad, w.grad]

    for _ in range(2):
        assert_same_bits(run(offloading(1.0, "pipeline")), run(nullcontext()))


@pytest.mark.parametrize("window_bytes", [0, None])
def test_graph_that_is_retained(window_bytes: int | None, device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        with context:
            loss = skips(x, w).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, w.grad]

    assert_same_bits(run(offloading(1.0, "retained", window_bytes=window_bytes)), run(nullcontext()))


def test_double_backward(device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        with context:
            loss = mlp(x, w).square().sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = grad.square().sum()
        (loss + penalty).backward()
        return [x.grad, w.grad]

    assert_same_bits(run(offloading(1.0, "double", window_bytes=0)), run(nullcontext()))


def test_partial_backwards(device: Device, offloading: Offload) -> None:
    def run(context: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        with context:
            hidden = mlp(x, w)
            left, right = mlp(hidden, w).sum(), skips(hidden, w).sum()
        (first,) = torch.autograd.grad(left, hidden, retain_graph=True)
        right.backward(retain_graph=True)
        (left + right).backward()
        return [first, x.grad, w.grad]

    for _ in range(2):
        assert_same_bits(run(offloading(1.0, "partial")), run(nullcontext()))


def test_graph_dropped_unused(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    for _ in range(3):
        with offloading(1.0, "dropped", window_bytes=0):
            mlp(x, w)

    device.synchronize()
    stats = memkit.stats("dropped")

    assert (stats.live_records, stats.host_in_use_bytes) == (0, 0)
    assert stats.moved_out_bytes > 0


def test_saved_tensors_read_outside_a_backward(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    with offloading(1.0, "read", window_bytes=0):
        y = functional.linear(x, w).exp()
        z = y.sin()
    expected = y.detach().clone()
    z_node = z.grad_fn
    del y

    assert torch.equal(z_node._saved_self, expected)
    assert torch.equal(z_node._saved_self, expected)


def test_pack_on_one_stream_and_unpack_on_another(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    side = device.new_stream("side")
    with offloading(1.0, "streams", window_bytes=0):
        loss = mlp(x, w).sum()
    device.wait_event(side, device.record_event())
    with device.on_stream(side):
        loss.backward(retain_graph=True)
        done = device.record_event()
    device.wait_event(device.current_stream(), done)
    loss.backward()

    plain = gradients(mlp, device.torch_device, nullcontext)
    x2, w2 = inputs_on(device.torch_device)
    loss2 = mlp(x2, w2).sum()
    loss2.backward(retain_graph=True)
    loss2.backward()
    assert plain
    assert_same_bits([x.grad, w.grad], [x2.grad, w2.grad])


def test_forward_on_a_side_stream(device: Device, offloading: Offload) -> None:
    side = device.new_stream("side")
    x, w = inputs_on(device.torch_device)
    device.wait_event(side, device.record_event())
    with device.on_stream(side), offloading(1.0, "side", window_bytes=0):
        loss = mlp(x, w).sum()
        done = device.record_event()
    device.wait_event(device.current_stream(), done)
    loss.backward()

    x2, w2 = inputs_on(device.torch_device)
    mlp(x2, w2).sum().backward()
    assert_same_bits([x.grad, w.grad], [x2.grad, w2.grad])


def test_threads_with_their_own_forwards(device: Device, offloading: Offload) -> None:
    found: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        x, w = inputs_on(device.torch_device)
        for _ in range(5):
            x.grad = w.grad = None
            with offloading(1.0, "threads", window_bytes=0):
                loss = mlp(x * (number + 1), w).sum()
            loss.backward()
        found[number] = [x.grad, w.grad]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for number in range(3):
        x, w = inputs_on(device.torch_device)
        mlp(x * (number + 1), w).sum().backward()
        assert_same_bits(found[number], [x.grad, w.grad])


def test_two_tags_at_once(device: Device, offloading: Offload) -> None:
    def run(outer: object, inner: object) -> list[Tensor]:
        x, w = inputs_on(device.torch_device)
        with outer:
            hidden = mlp(x, w)
            with inner:
                hidden = skips(hidden, w)
            loss = mlp(hidden, w).sum()
        loss.backward()
        return [x.grad, w.grad]

    found = run(offloading(1.0, "outer", window_bytes=0), offloading(0.5, "inner", window_bytes=0))

    assert_same_bits(found, run(nullcontext(), nullcontext()))
    assert memkit.stats("inner").ratio_reached < 1 == memkit.stats("outer").ratio_reached


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_writing_to_a_saved_tensor_raises_autograds_error(kept: float, device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    with offloading(1.0 - kept, "written", window_bytes=0):
        y = functional.linear(x, w).exp()
        loss = y.sin().sum()
    with torch.no_grad():
        y[0].mul_(2)

    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: .*\[8, 32\]\] is at version 1; expected version 0"
    ):
        loss.backward()


def test_writing_to_a_parameter_before_the_backward_raises(device: Device, offloading: Offload) -> None:
    x, w = inputs_on(device.torch_device)
    with offloading(1.0, "parameter"):
        loss = mlp(x, w).sum()
    with torch.no_grad():
        w.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_grad_scaler_and_optimizer_steps(device: Device, offloading: Offload) -> None:
    def run(make: object) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).to(device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=128.0)
        x = inputs_on(device.torch_device)[0].detach()
        for _ in range(4):
            optimizer.zero_grad()
            with make(), torch.autocast(device.torch_device.type, torch.bfloat16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [param.detach() for param in model.parameters()]

    assert_same_bits(run(lambda: offloading(1.0, "scaler")), run(nullcontext))
