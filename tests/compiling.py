"""What tests with compiled modules share: the ways to compile one, a backend that counts, and what Dynamo has looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkit

WITH_COMPILED = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_compiled_code_is_left"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo looks at it
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # resetting Dynamo imports such code
]
"""What a file of such tests is marked with. Any other warning is an error: also the one that a whole model gives."""


class Backend:
    """A backend that counts the graphs it is given.

    Args:
        name: that of torch's own which compiles them.
    """

    def __init__(self, name: str = "aot_eager") -> None:
        self.name = name
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.num_graphs += 1
        return lookup_backend(self.name)(graph, inputs)


def _compile_call(module: nn.Module, backend: Backend) -> nn.Module:
    module.compile(backend=backend)
    return module


def _compile_module(module: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(module, backend=backend)  # type: ignore[no-any-return]


def _compile_forward(module: nn.Module, backend: Backend) -> nn.Module:
    module.forward = torch.compile(module.forward, backend=backend)
    return module


FORMS: dict[str, Callable[[nn.Module, Backend], nn.Module]] = {
    "call": _compile_call,
    "module": _compile_module,
    "forward": _compile_forward,
}
"""The ways to compile a module by itself: each takes one, and returns the one to call."""


def forms_on(*others: str) -> pytest.MarkDecorator:
    """Return what a test takes `form` and `device` from: each form where copies land late, and on a GPU. Of other devices each
    has one form: how a block was compiled changes nothing in when copies land."""
    pairs: list[object] = [(form, "late") for form in sorted(FORMS)]
    pairs += [("call", name) for name in others]
    pairs += [pytest.param(form, "cuda", marks=pytest.mark.gpu) for form in sorted(FORMS)]
    return pytest.mark.parametrize(("form", "device"), pairs, indirect=["device"])


def in_form(form: str, module: nn.Module, backend: Backend) -> nn.Module:
    return FORMS[form](module, backend)


def frames_of_memkit() -> list[str]:
    """Return the functions of memkit that Dynamo was asked to compile since it was reset: "file:function".

    Those of the reference device count for nothing: it is told of each storage that dies, whoever runs.
    """
    codes = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    package = Path(memkit.__file__).parent
    found = [code for code in codes if code is not None and Path(code.co_filename).is_relative_to(package)]
    names = [f"{Path(code.co_filename).relative_to(package)}:{code.co_name}" for code in found]
    return [name for name in names if not name.startswith("device/")]


def may_be_compiled_here() -> bool:
    """Tell whether Dynamo would be asked to compile what the caller calls."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() not in (None, False)
