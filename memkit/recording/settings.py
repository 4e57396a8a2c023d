"""What is set for the whole process and changes what an op computes: noted in the forward, so that a replay can have it too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memkit import torch_private


def _of(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(place, name), lambda setting: setattr(place, name, setting)


@functools.cache
def _settings() -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch_private.get_mkldnn_enabled, torch_private.set_mkldnn_enabled),
        (torch_private.get_cudnn_enabled, torch_private.set_cudnn_enabled),
        (torch_private.get_cudnn_benchmark, torch_private.set_cudnn_benchmark),
        (torch_private.get_cudnn_deterministic, torch_private.set_cudnn_deterministic),
        _of(torch.backends.cuda.matmul, "fp32_precision"),
        _of(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        _of(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        *((_of(part, "fp32_precision")) for part in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn)),  # type: ignore[attr-defined]
        *((_of(part, "fp32_precision")) for part in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)),  # type: ignore[attr-defined]
    )


Settings = tuple[Any, ...]


def current_settings() -> Settings:
    """Return what is set now."""
    return tuple([get() for get, _ in _settings()])


@contextmanager
def with_settings(wanted: Settings) -> Iterator[None]:
    """Return a context in which all is set as it was."""
    found = current_settings()
    try:
        try:
            _change(found, wanted)
            yield
        finally:
            _change(wanted, found)
    finally:
        _change(current_settings(), found)  # again, where an interrupt came in between


def _change(found: Settings, wanted: Settings) -> None:
    for (_, change), before, after in zip(_settings(), found, wanted, strict=True):
        if before != after:
            change(after)
