"""What stands around the calls of compiled modules: outside of the compiled code, in each way to compile a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit.core.compiled import around_compiled, compiled_in, is_compiled
from memkit.core.hooks import HookSet
from tests.compiling import FORMS, WITH_COMPILED, Backend, frames_of_memkit, in_form, may_be_compiled_here

pytestmark = WITH_COMPILED
Compile = Callable[[nn.Module, Backend], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.linear(x).sin() * scale


def _decorated(backend: Backend) -> nn.Module:
    class Decorated(Block):
        forward = torch.compile(Block.forward, backend=backend)

    return Decorated()


def noting(calls: list[Any]) -> Callable[..., Any]:
    """Return what runs the compiled code and notes each call."""

    def run(called: nn.Module, code: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((called, args, kwargs, may_be_compiled_here()))
        return code(*args, **kwargs)

    return run


ALL_FORMS = {**FORMS, "decorated": lambda module, backend: _decorated(backend)}


@pytest.fixture(params=sorted(ALL_FORMS))
def compile_block(request: pytest.FixtureRequest) -> Compile:
    return ALL_FORMS[request.param]


def test_compiled_modules_are_told_from_others(compile_block: Compile) -> None:
    block = Block()

    assert not is_compiled(block)
    assert is_compiled(compile_block(block, Backend()))
    assert list(compiled_in(nn.Sequential(nn.Linear(1, 1)))) == []


def test_compiled_modules_are_found_once_and_not_within_others() -> None:
    first, shared = (in_form(form, Block(), Backend()) for form in ("module", "call"))
    outer = nn.Sequential(in_form("call", Block(), Backend()), Block())
    outer.compile(backend="eager")
    model = nn.Sequential(nn.Sequential(first, Block()), shared, outer, shared)

    assert list(compiled_in(model)) == [first, shared, outer]
    assert list(compiled_in(outer)) == [outer]


@pytest.mark.parametrize(
    "make",
    [
        torch.compiler.disable,
        lambda block: torch.compile(block, disable=True),
        lambda block: block.compile(disable=True) or block,
        lambda block: setattr(block, "forward", torch.compiler.disable(block.forward)) or block,
    ],
)
def test_module_that_is_kept_from_being_compiled_is_not(make: Callable[[nn.Module], nn.Module]) -> None:
    made = make(Block())

    assert not is_compiled(made)
    with pytest.raises(ValueError, match=rf"needs a module that torch\.compile runs; found {type(made).__name__}"):
        around_compiled(HookSet(), made, lambda *_: None)


def test_run_is_called_in_place_of_the_code(compile_block: Compile) -> None:
    backend = Backend()
    module = compile_block(Block(), backend)
    x = torch.randn(3, 4)
    plain, num_graphs = module(x, scale=3.0), backend.num_graphs
    calls = list[Any]()

    with HookSet() as hooks:
        around_compiled(hooks, module, noting(calls))
        assert is_compiled(module)
        for _ in range(3):
            assert torch.equal(module(x, scale=3.0), plain)
    module(x, scale=3.0)

    assert calls == [(module, (x,), {"scale": 3.0}, False)] * 3
    assert backend.num_graphs == num_graphs == 1
    assert frames_of_memkit() == []


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_attributes_are_as_before(compile_block: Compile) -> None:
    module = compile_block(Block(), Backend())
    before = dict(vars(module))
    first, second = HookSet(), HookSet()
    for hooks in (first, second):
        around_compiled(hooks, module, noting([]))
    assert vars(module) != before

    with HookSet() as hooks:
        around_compiled(hooks, module, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            module(torch.randn(3, 4))
    first.remove()  # not the last that was set
    assert vars(module) != before
    module(torch.randn(3, 4))
    second.remove()
    second.remove()

    assert vars(module) == before


def test_copy_is_without_it(compile_block: Compile) -> None:
    module = compile_block(Block(), Backend())
    calls = list[Any]()

    with HookSet() as hooks:
        around_compiled(hooks, module, noting(calls))
        copied = copy.deepcopy(module)
    copied(torch.randn(3, 4))

    assert calls == []


def test_in_the_trace_of_what_is_compiled_around_it_runs_as_it_is() -> None:
    """Dynamo breaks the graph of the caller there, and compiles nothing of memkit."""
    inner = in_form("forward", Block(), Backend())
    x, calls = torch.randn(3, 4), list[Any]()
    plain = inner(x).cos()

    with HookSet() as hooks:
        around_compiled(hooks, inner, noting(calls))
        found = torch.compile(lambda x: inner(x).cos(), backend="aot_eager")(x)

    assert torch.equal(found, plain)
    assert [called for called, *_ in calls] == [inner]
    assert frames_of_memkit() == []
