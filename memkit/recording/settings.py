"""Process-wide settings that change what an op computes: noted in the forward, so that replays run under the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from memkit import torch_private

Setting = tuple[Callable[[], Any], Callable[[Any], None]]
"""A function that reads the setting, which runs often and so is not Python, and one that sets it."""


def _fp32_precision(backend: str, op: str, place: Any) -> Setting:
    return partial(torch_private.fp32_precision_of, backend, op), partial(setattr, place, "fp32_precision")


@functools.cache
def _settings() -> tuple[Setting, ...]:
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch_private.get_mkldnn_enabled, torch_private.set_mkldnn_enabled),
        (torch_private.get_cudnn_enabled, torch_private.set_cudnn_enabled),
        (torch_private.get_cudnn_benchmark, torch_private.set_cudnn_benchmark),
        (torch_private.get_cudnn_deterministic, torch_private.set_cudnn_deterministic),
        (
            torch_private.get_cublas_allow_fp16_reduced_precision_reduction,
            partial(setattr, matmul, "allow_fp16_reduced_precision_reduction"),
        ),
        (
            torch_private.get_cublas_allow_bf16_reduced_precision_reduction,
            partial(setattr, matmul, "allow_bf16_reduced_precision_reduction"),
        ),
        _fp32_precision("cuda", "matmul", matmul),
        *(_fp32_precision("cuda", op, getattr(cudnn, op)) for op in ("conv", "rnn")),
        *(_fp32_precision("mkldnn", op, getattr(mkldnn, op)) for op in ("matmul", "conv")),
        (torch_private.get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (torch_private.get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch_private.get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
        (torch_private.get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    )


Settings = tuple[Any, ...]


@functools.cache
def setting_getters() -> tuple[partial[Any], ...]:
    """Return the functions that read the settings."""
    return tuple(partial(get) for get, _ in _settings())


def current_settings() -> Settings:
    """Return the current settings."""
    return tuple(map(partial.__call__, setting_getters()))


@contextmanager
def with_settings(wanted: Settings) -> Iterator[None]:
    """Return a context with these settings."""
    found = current_settings()
    try:
        try:
            change_settings(found, wanted)
            yield
        finally:
            change_settings(wanted, found)
    finally:
        change_settings(current_settings(), found)  # again, where an interrupt came in between


def change_settings(found: Settings, wanted: Settings) -> None:
    """Set the wanted settings, where they differ from those found; may be called again."""
    for (_, change), before, after in zip(_settings(), found, wanted, strict=True):
        if before != after:
            change(after)
