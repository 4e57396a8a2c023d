"""How fast an optimizer steps on the host, and the link copies beside that: for the split of `update="both"`."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from memkit.device.base import Device
from memkit.optimizers.shells import cut_group, put_in_train_mode, shell_of, step_of
from memkit.plan import StateRates
from memkit.states.packing import copy_state, may_leave, pack
from memkit.transfer.arena import Arena
from memkit.transfer.link import measure_beside_copies

_SIZE = (4096, 2048)
"""As many elements as a piece has, about."""
_NUM_BLOCKS = 4
"""With their states more than a processor's cache holds."""
_NUM_AHEAD = 2
"""So many are given to the thread that steps: it never waits for the other."""
_NUM_GIVEN = 100
"""About as many ops as go to the device for a piece that is stepped on the host, and one on the device beside it."""
_LINK_BYTES = 64 * 2**20
_NUM_COPIES = 128
_NUM_COPIES_ELSEWHERE = 2
"""Where nothing is copied beside what the host does."""
_NUM_ROUNDS = 3
_NUM_ROUNDS_ELSEWHERE = 1


class _Block:
    """A parameter, its gradient and its states in memory as pieces have, stepped as these are.

    Args:
        optimizer: whose step it is.
        dtype: of what is stepped, and of its gradient.
        arena: gives the memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype, arena: Arena) -> None:
        self._arena = arena
        self.parameter = nn.Parameter(self._placed({"parameter": torch.zeros(_SIZE, dtype=dtype)})["parameter"])
        self.parameter.grad = self._placed({"grad": torch.full(_SIZE, 1e-3, dtype=dtype)})["grad"]
        group = {**cut_group(optimizer.param_groups[0], []), "params": [self.parameter]}
        group.pop("param_names", None)
        self._shell = shell_of(optimizer, [group], type(optimizer.state)(dict))
        put_in_train_mode(self._shell)
        self._step = step_of(optimizer)
        self.step()
        entries = self._shell.state[self.parameter]
        entries.update(self._placed({name: value for name, value in entries.items() if may_leave(value)}))

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of tensors that lie side by side in pinned memory."""
        (row,), num_bytes = pack([tensors])
        if not num_bytes:
            return {}
        (span,) = self._arena.take_pinned_as_one([num_bytes])
        found = {packed.name: packed.on_host(span) for packed in row}
        for name, tensor in found.items():
            copy_state(tensor, tensors[name])
        return found

    def step(self) -> None:
        self._step(self._shell)


def measure_rates(device: Device, optimizer: torch.optim.Optimizer, *, has_master: bool) -> StateRates:
    """Return what a split between device and host is made from: the link with both ways busy and the class's step on
    parameters in host memory, each beside the other.

    A step on the host reads and writes what the optimizer does, and no more: see [Note: casts on the device] in
    `memkit.states.host_steps`. So that is what is timed, in a thread of its own, with as many threads as torch takes. It has
    the next one to step when one is over, as in a step. This thread gives the device as much work as goes with a piece, and
    waits: what it takes of the cores and of the interpreter counts. Of several rounds the one with the most steps counts: a
    host that did something else for the tenth of a second that a round takes would be given nothing for the whole training.

    Args:
        has_master: whether float32 copies are stepped.

    Raises:
        HostMemoryError: there is no room in host memory for what is timed.
    """
    is_apart = device.torch_device.type == "cuda"
    arena = Arena(device, must_pin=False)
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        stack.callback(arena.close)
        stack.callback(arena.give_all)
        thread = stack.enter_context(ThreadPoolExecutor(1, "memkit-measure", device.enter_thread))
        blocks = [_Block(optimizer, _dtype_of(optimizer, has_master=has_master), arena) for _ in range(_NUM_BLOCKS)]
        for block in blocks:
            thread.submit(block.step).result()
        turns = _Turns(blocks, thread, device)
        blocks_per_s, link_bytes_per_s = max(
            measure_beside_copies(
                device,
                turns.step,
                num_bytes=_LINK_BYTES,
                num_copies=_NUM_COPIES if is_apart else _NUM_COPIES_ELSEWHERE,
                most_acts=None if is_apart else _NUM_BLOCKS,
            )
            for _ in range(_NUM_ROUNDS if is_apart else _NUM_ROUNDS_ELSEWHERE)
        )
        host_numel_per_s = blocks_per_s * blocks[0].parameter.numel()
        turns.end()
        blocks.clear()  # ahead of the memory that they are in
    return StateRates(link_bytes_per_s=link_bytes_per_s, host_numel_per_s=host_numel_per_s)


class _Turns:
    """Steps of blocks, one after the other, given out as those of pieces are.

    Args:
        blocks: take turns.
        thread: steps them.
        device: what is given work meanwhile.
    """

    def __init__(self, blocks: Sequence[_Block], thread: ThreadPoolExecutor, device: Device) -> None:
        self._turns, self._thread = itertools.cycle(blocks), thread
        self._number = torch.zeros(1, device=device.torch_device)
        self._under_way = deque[Future[None]]()

    def step(self) -> None:
        """Have a block be stepped, and the thread have the next one when it is over. Meanwhile the device gets what it gets
        beside a piece."""
        while len(self._under_way) < _NUM_AHEAD:
            self._under_way.append(self._thread.submit(next(self._turns).step))
        for _ in range(_NUM_GIVEN):
            self._number.add_(1)
        self._under_way.popleft().result()

    def end(self) -> None:
        """Wait for what is under way, and hold no block any more."""
        self._turns = itertools.cycle(())
        while self._under_way:
            self._under_way.popleft().result()


def _dtype_of(optimizer: torch.optim.Optimizer, *, has_master: bool) -> torch.dtype:
    """Return what most elements are stepped in."""
    if has_master:
        return torch.float32
    numels = Counter[torch.dtype]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numels[parameter.dtype] += parameter.numel()
    return max(numels, key=numels.__getitem__, default=torch.float32)
