"""Autograd's own threads: on a GPU, it is they that run backwards."""

from __future__ import annotations

import torch


def let_go_of_last_backward(torch_device: torch.device) -> None:
    """Have autograd's thread for a GPU be done with all backwards until now; elsewhere there is none.

    `backward()` returns when that thread has told of its end, which is ahead of its letting go: of the modes and hooks that
    were on as the backward began, and of the error that has broken it off, with the frames in its traceback and the graph in
    these. For that it needs Python's lock, which the caller may keep for long. It takes up nothing else before.

    Source: `Engine::thread_main` in torch/csrc/autograd/engine.cpp.
    """
    if torch_device.type != "cpu":
        torch.ones(1, device=torch_device, requires_grad=True).sum().backward()
