"""`StateOffload` beside `LayerOffload` on a Llama whose every layer streams: a step, what the link allows, and a cap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from setting import GIB, Setting, say
from shared import Line
from states_steps import LR, Loop, PlainAdamW, Trained, plain_line, timed, told, trained_llama
from torch.nn.attention import SDPBackend, sdpa_kernel

import memkit
from memkit.transfer import measure_link
from memkit.transfer.lanes import measure_both_ways

WEIGHT_BYTES = 2
STATE_BYTES = 12
"""Of three float32 states, one of which is the copy of the weight."""
HOST_ROW_S = 45.0
"""How much time must be left for the row that steps on the host."""
CAP_BYTES = 24 * GIB
NUM_CAPPED_STEPS = 50
END_S = 20.0
"""What is left of a part's time for its end."""
CAPPED = {"num_layers": 32, "width": 4096, "inner": 11008, "num_heads": 32}
NUM_COMPARED_LAYERS = 4
NUM_COMPARED_STEPS = 6
COMPARED_LR = 1e-4


def streamed(setting: Setting) -> Iterator[Line]:
    """Every layer streams, with all states: stepped within the backward; then the same stepped on the host."""
    num_bytes = 2**20 if setting.tiny else 2**28
    link, both = measure_link(setting.device, num_bytes=num_bytes), measure_both_ways(setting.device, num_bytes=num_bytes)
    machine = {"d2h_bytes_per_s": link.d2h_bytes_per_s, "h2d_bytes_per_s": link.h2d_bytes_per_s, "both_bytes_per_s": both}
    say(f"link: {machine}")
    trained = trained_llama(setting)
    about = {"bench": "states_streamed", "model": trained.workload.name, "numel": trained.numel, **machine}
    plain = setting.attempt(partial(plain_line, trained, setting, clips=False))
    yield {**about, "row": "plain", **told("plain", plain)}
    found = setting.attempt(partial(_stepped_in_backward, trained, setting))
    yield {**about, "row": "all streams", **told("all streams", {**found, **_least(plain, found, machine, trained.numel)})}
    if setting.time_left_s() > HOST_ROW_S:
        line = setting.attempt(partial(_stepped_on_host, trained, setting))
        yield {**about, "row": "all streams, stepped on the host", **told("stepped on the host", line)}


def _least(plain: Line, found: Line, machine: Line, numel: int) -> Line:
    """Return the least that a step takes in which all streams, `r_s`, what that is made of, and the ratio to it."""
    if "error" in plain or "error" in found:
        return {}
    there_s = WEIGHT_BYTES * found["streamed_numel"] / machine["h2d_bytes_per_s"]
    both_ways_bytes = WEIGHT_BYTES * found["streamed_numel"] + STATE_BYTES * numel  # each way, in the backward
    both_ways_s = both_ways_bytes / machine["both_bytes_per_s"]
    forward_s, backward_s = plain["forward_s"], plain["backward_s"]
    r_s = max(forward_s, there_s) + max(backward_s, both_ways_s)
    parts = f"max({forward_s:.3f}, {there_s:.3f}) + max({backward_s:.3f}, {both_ways_s:.3f})"
    say(f"R = {parts} = {r_s:.3f} s; a step takes {found['step_s'] / r_s:.2f} of it")
    return {
        "plain_forward_s": forward_s,
        "plain_backward_s": backward_s,
        "weights_s": there_s,
        "both_ways_s": both_ways_s,
        "r_s": r_s,
        "to_r": found["step_s"] / r_s,
    }


@contextmanager
def all_streams(
    trained: Trained, setting: Setting, *, lr: float = LR, master: torch.dtype | None = torch.float32
) -> Iterator[tuple[memkit.LayerOffload, memkit.StateOffload]]:
    """Have weights, gradients and states stream, and copies of the parameters in the dtype `master`. In the end the states
    are dropped: as tensors of their own they would take as much host memory again."""
    trained.model.to("cpu")
    setting.clean()
    make = partial(torch.optim.AdamW, lr=lr, fused=True)
    with memkit.LayerOffload(trained.model, offload_ratio=1.0, optimizer=make, device=setting.device) as layers:
        optimizer = layers.optimizer
        assert optimizer is not None
        with memkit.StateOffload(optimizer, when="backward", master=master, device=setting.device) as states:
            try:
                yield layers, states
            finally:
                optimizer.state.clear()


def _stepped_in_backward(trained: Trained, setting: Setting, num_steps: int = 6) -> Line:
    with all_streams(trained, setting) as (layers, states):
        found = timed(trained, Loop(update=states.optimizer.step), setting, num_steps=num_steps)
        about = about_streams(layers, states)
    trained.clear()
    return {**found, **about}


def about_streams(layers: memkit.LayerOffload, states: memkit.StateOffload) -> Line:
    """Return what streams."""
    moved, stepped = layers.stats(), states.stats()
    return {
        "num_streamed": moved.num_streamed,
        "streamed_numel": moved.streamed_bytes // WEIGHT_BYTES,
        "slot_bytes": moved.slot_bytes,
        "room_bytes": stepped.room_bytes,
        "weights_host_bytes": moved.host_bytes,
        "states_host_bytes": stepped.host_bytes,
        "num_overflows": moved.num_overflows,
        "num_demand_fetches": moved.num_demand_fetches,
    }


def _stepped_on_host(trained: Trained, setting: Setting, num_steps: int = 4) -> Line:
    trained.model.to("cpu")
    setting.clean()
    make = partial(torch.optim.AdamW, lr=LR, fused=True)
    with memkit.LayerOffload(trained.model, offload_ratio=1.0, train="host", device=setting.device) as layers:
        inside = [trained.model.get_submodule(layer.name) for layer in layers.plan.layers]
        streams = {id(parameter) for module in inside for parameter in module.parameters()}
        optimizer = make([parameter for parameter in trained.parameters if id(parameter) in streams])
        rest = make([parameter for parameter in trained.parameters if id(parameter) not in streams])
        with memkit.StateOffload(rest, device=setting.device) as states:

            def update() -> None:
                rest.step()
                optimizer.step()

            found = timed(trained, Loop(update=update, wait=states.wait), setting, num_steps=num_steps, num_warm=1)
        stats = layers.stats()
    trained.clear()
    return {**found, "num_streamed": stats.num_streamed, "slot_bytes": stats.slot_bytes, "host_bytes": stats.host_bytes}


def _cap(setting: Setting) -> Line:
    """Have no more than the cap be allocated from now on."""
    is_cuda = setting.device.torch_device.type == "cuda"
    if is_cuda:
        torch.cuda.set_per_process_memory_fraction(CAP_BYTES / torch.cuda.mem_get_info()[1])
    return {"cap_bytes": CAP_BYTES, "is_capped": is_cuda}


def capped(setting: Setting) -> Iterator[Line]:
    """6.7 billion parameters, of which every layer streams with its states, under a cap: as many steps as there is time for."""
    start_s = time.perf_counter()
    trained = trained_llama(setting, **CAPPED)
    trained.model.to("cpu")
    setting.clean()
    about = {"bench": "states_capped", "numel": trained.numel, **_cap(setting), "built_s": time.perf_counter() - start_s}
    say(f"capped: {trained.numel / 1e9:.2f}e9 parameters, built in {about['built_s']:.0f} s")
    yield {**about, **told("capped", setting.attempt(partial(_steps_in_time, trained, setting)))}


def _steps_in_time(trained: Trained, setting: Setting) -> Line:
    with all_streams(trained, setting) as (layers, states):
        loop = Loop(update=states.optimizer.step)
        first = timed(trained, loop, setting, num_steps=2, num_warm=1)
        say(f"capped: {first['step_s']:.2f} s a step, {setting.time_left_s():.0f} s are left")
        most = int((setting.time_left_s() - END_S) / first["step_s"])
        num_before = states.stats().num_steps
        found = timed(trained, loop, setting, num_steps=max(2, min(NUM_CAPPED_STEPS - num_before, most)), num_warm=0)
        about = {**about_streams(layers, states), "num_steps_in_all": states.stats().num_steps}
    trained.clear()
    return {**found, **about}


def compared(setting: Setting) -> Iterator[Line]:
    """A few layers of the capped model: the losses of plain steps, twice, and under the cap with all streaming, bit for bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums of whole numbers make masks, and are refused
    torch.utils.deterministic.fill_uninitialized_memory = False  # pinned memory is large
    try:
        with sdpa_kernel(SDPBackend.MATH):  # others' backwards add up in any order unless an error is raised for the masks
            yield from _compared(setting)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def _compared(setting: Setting) -> Iterator[Line]:
    trained = trained_llama(setting, **{**CAPPED, "num_layers": NUM_COMPARED_LAYERS})
    begin = {name: value.detach().cpu().clone() for name, value in trained.model.state_dict().items()}
    about = {"bench": "states_compared", "numel": trained.numel}
    plain: Line = {}
    for name in ("plain", "plain again"):
        trained.model.load_state_dict(begin)
        found = setting.attempt(partial(_losses, trained, setting, None))
        plain = plain or found
        line = {**found, "are_losses_equal": "error" not in found and found["losses"] == plain.get("losses")}
        yield {**about, "row": name, **told(name, line)}
    trained.model.load_state_dict(begin)
    about |= _cap(setting)
    found = setting.attempt(partial(_losses_streamed, trained, setting))
    line = {**found, "are_losses_equal": "error" not in found and found["losses"] == plain.get("losses")}
    say(f"losses: {plain.get('losses')}, {found.get('losses')}")
    yield {**about, "row": "all streams, capped", **told("all streams, capped", line)}


def _losses_streamed(trained: Trained, setting: Setting) -> Line:
    with all_streams(trained, setting, lr=COMPARED_LR) as (_, states):
        return _losses(trained, setting, states.optimizer)


def _losses(trained: Trained, setting: Setting, optimizer: torch.optim.Optimizer | None) -> Line:
    """Return the loss of each of some steps, and what one takes."""
    update = PlainAdamW(trained.parameters, lr=COMPARED_LR).step if optimizer is None else optimizer.step
    setting.reset_peak()
    losses = []
    start_s = time.perf_counter()
    for _ in range(NUM_COMPARED_STEPS):
        loss = trained.workload.forward()
        loss.backward()
        update()
        trained.clear()
        losses.append(loss.item())
    return {"losses": losses, "step_s": (time.perf_counter() - start_s) / len(losses), "memory": setting.memory()}
