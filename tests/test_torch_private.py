"""Each private name of torch, taken away: one feature says so by name, and the others go on."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memkit
from memkit.activations.offloading.moving_stage import is_from_leaf
from memkit.core import torch_private
from memkit.core.tensors import storages_of
from memkit.core.torch_private import NAMES, Feature
from memkit.core.torch_state import is_sharded_by_fsdp
from memkit.device import ReferenceDevice
from memkit.errors import MissingTorchNameError
from memkit.profile.simulate import attention, run, target
from memkit.recording import borders, ops
from memkit.weights import layer_offload, selection

pytestmark = pytest.mark.slow

CONTEXTS = (Feature.OFFLOAD, Feature.REMAT, Feature.LAYERS)
TAGGED = [(name, feature) for name, private in NAMES.items() for feature in private.features]
OPTIONAL = [name for name, private in NAMES.items() if not private.features]


@pytest.fixture
def take_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has torch be without a name, for memkit alone: torch itself uses most of them."""
    look_up, taken = torch_private.look_up, set[str]()
    monkeypatch.setattr(torch_private, "_complete", set())
    monkeypatch.delitem(sys.modules, borders.FSDP, raising=False)  # what a test imports first asks for more names

    def take(name: str) -> None:
        taken.update((NAMES[name].symbol, NAMES[name].sample))

        def refuse(symbol: str) -> Any:
            if symbol in taken:
                raise AttributeError(symbol)
            return look_up(symbol)

        monkeypatch.setattr(torch_private, "look_up", refuse)
        monkeypatch.delitem(vars(torch_private), name, raising=False)

    return take


class Model(nn.Module):
    """What a profile looks into: buffers, a mask that the forward makes, what reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(3, dtype=torch.bool).to(x.device)
        return self.norm(self.convolution(x)).relu() * int(mask.sum())


def profile(device: str) -> None:
    memkit.profile_memory(
        Model(), torch.ones(2, 3, 8, 8), device=device, backward=True, print_table=False, tag="torch_private", warmup=0
    )


def attend(fused: Callable[[Any], Tensor]) -> Callable[[], object]:
    tensors = [torch.empty(1, 2, 8, 8, device="meta") for _ in range(3)]
    return lambda: fused(attention._Call(*tensors, None, 0.5, False, None, False))


def names_autocast() -> None:
    target.autocast_ops.cache_clear()
    target.autocast_ops("cuda")


class Replica(nn.Module):
    """Stands for a DistributedDataParallel without what the refusal reads."""


def ask_what_is_sharded() -> None:
    importlib.import_module(borders.FSDP)
    borders.mark_sharded()


def pad_as_on_target() -> None:
    with target.TargetMode("cuda", backend_dependent=lambda: None):
        functional.pad(torch.ones(1, 1, 4, 4, device="meta"), (1, 1, 1, 1), mode="reflect")


def move_as_on_target() -> None:
    with run.TargetOps("cpu"):
        torch.ones(1).to("meta")


OPENERS: dict[Feature, Callable[[], object]] = {
    Feature.OFFLOAD: lambda: memkit.CPUOffload(0.5, "torch_private", device=ReferenceDevice()),
    Feature.REMAT: lambda: memkit.Rematerialize(0.5, "torch_private", device=ReferenceDevice()),
    Feature.LAYERS: lambda: memkit.LayerOffload(Model(), ["convolution"], num_resident=0, device=ReferenceDevice()).close(),
    Feature.PROFILE: lambda: profile("cpu"),
    Feature.META: lambda: profile("meta"),
}
"""What raises where a name is missing that a feature cannot do without."""

USES: dict[str, Callable[[], object]] = {
    "active_replica": lambda: torch_private.active_replica,
    "parameters_of_replica": lambda: torch_private.parameters_of_replica(Replica()),
    "scale_of": lambda: torch_private.scale_of(Replica()),  # type: ignore[arg-type]  # no scaler, on purpose
    "unscale_grads": lambda: layer_offload.GradScaler("cpu")._unscale_grads_(None, torch.ones(1), torch.ones(1), False),  # type: ignore[arg-type]
    "op_of_custom": lambda: torch_private.op_of_custom(Replica()),  # type: ignore[arg-type]  # no op, on purpose
    "packet_name": lambda: ops.names_of_ops([torch.ops.aten.mul]),
    "higher_order_effect": lambda: torch_private.higher_order_effect(torch.ops.aten.mul.Tensor),
    "sparse_indices": lambda: list(storages_of(torch.eye(2).to_sparse())),
    "sparse_values": lambda: list(storages_of(torch.eye(2).to_sparse())),
    "make_subclass": lambda: run.MetaTwins().of(nn.Parameter(torch.ones(1))),
    "flash_attention_cpu": attend(attention._flash_cpu),
    "flash_attention": attend(attention._flash_cuda),
    "efficient_attention": attend(attention._efficient_cuda),
    "cudnn_attention": attend(attention._cudnn),
    "safe_softmax": attend(attention._math_cuda),
    "fused_sdp_choice": lambda: attention._is_fused((1, 2, 8), (1, 2, 8)),
    "select_conv_backend": lambda: target.uses_onednn(
        torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    ),
    "dispatch_registrations": names_autocast,
    "nn_functions": pad_as_on_target,
    "backward_task": move_as_on_target,
    "sharded_modules": ask_what_is_sharded,
}
"""The same of names that only some models, or some arguments, need."""


@pytest.mark.parametrize(("name", "feature"), TAGGED)
def test_feature_says_which_name_it_misses(name: str, feature: Feature, take_away: Callable[[str], None]) -> None:
    if name == "DispatchMode" and feature is Feature.PROFILE:
        pytest.skip("looked up when the modules are imported: see the test with processes of their own")
    take_away(name)
    use = OPENERS[feature] if feature in CONTEXTS else USES.get(name) or OPENERS[feature]

    with pytest.raises(MissingTorchNameError) as raised:
        use()

    assert raised.value.symbol == NAMES[name].symbol
    assert feature.value in str(raised.value)
    assert f"found torch {torch.__version__}, which does not have it" in str(raised.value)


@pytest.mark.parametrize("name", OPTIONAL)
def test_feature_goes_on_without_what_it_only_compares(name: str, take_away: Callable[[str], None]) -> None:
    take_away(name)
    torch_private.known.cache_clear()
    try:
        assert torch_private.known(name) == ()
        for feature in (*CONTEXTS, Feature.META):
            OPENERS[feature]()
    finally:
        torch_private.known.cache_clear()


@pytest.mark.parametrize("feature", CONTEXTS)
def test_context_needs_nothing_that_is_not_its_own(feature: Feature, take_away: Callable[[str], None]) -> None:
    for name, private in NAMES.items():
        if feature not in private.features:
            take_away(name)

    OPENERS[feature]()


_WITHOUT = """
import json, sys
import torch
from memkit.core import torch_private
look_up, missing = torch_private.look_up, set(json.loads(sys.argv[1]))
symbols = {text for name in missing for text in (torch_private.NAMES[name].symbol, torch_private.NAMES[name].sample) if text}
def refuse(symbol):
    if symbol in symbols:
        raise AttributeError(symbol)
    return look_up(symbol)
torch_private.look_up = refuse
import memkit
print([getattr(memkit, name).__name__ for name in memkit.__all__])
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
try:
    report = memkit.profile_memory(model, torch.ones(2, 3, 8, 8), device="meta", print_table=False)
except memkit.errors.MissingTorchNameError as error:
    print(json.dumps([error.symbol, []]))
else:
    print(json.dumps([report.activation_bytes, sorted(set(torch_private.NAMES) & set(vars(torch_private)))]))
"""
"""What a process finds in which names of torch are missing from the start: it imports all of memkit, and profiles a model."""


def _without(missing: set[str]) -> Any:
    command = [sys.executable, "-c", _WITHOUT, json.dumps(sorted(missing))]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()[-1])


def test_import_and_profile_without_data_survive() -> None:
    plain, used = _without(set())
    untold = {name for name, private in NAMES.items() if not {Feature.PROFILE, Feature.META} & {*private.features}}

    assert _without(set(NAMES))[1] == []  # all of memkit is imported, and the profile says what it misses
    assert _without({"DispatchMode"}) == [NAMES["DispatchMode"].symbol, []]
    assert _without(set(NAMES) - set(used) | untold)[0] == plain > 0
    assert {"DispatchMode", "set_code_strategy"} <= {*used}  # others are taken away in this process


def test_error_says_need_found_and_what_to_do(take_away: Callable[[str], None]) -> None:
    take_away("num_storage_users")

    with pytest.raises(MissingTorchNameError) as raised:
        torch_private.num_storage_users  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        torch_private.nothing_like_it  # type: ignore[attr-defined]  # noqa: B018

    assert str(raised.value) == (
        "LayerOffload needs torch._C._storage_Use_Count (whether a slot is in use); found torch "
        f"{torch.__version__}, which does not have it. Install an older torch, or a newer memkit"
    )


def test_torch_has_what_is_needed_of_it() -> None:
    for name, private in NAMES.items():
        if private.features:
            assert getattr(torch_private, name) is not None
            assert vars(torch_private)[name] is getattr(torch_private, name)  # it is looked up once
    assert set(torch_private.__annotations__) - {"NAMES"} <= set(NAMES)
    assert len({private.symbol for private in NAMES.values()}) == len(NAMES)


# What is recognised by name


def test_graph_nodes_are_called_as_they_were() -> None:
    leaf = torch.ones(4, 4, requires_grad=True)
    aten = torch.ops.aten
    views = [leaf.t(), leaf.transpose(0, 1), leaf.view(16), aten._unsafe_view(leaf, (16,)), leaf.permute(1, 0), leaf[1:]]
    views += [aten._reshape_alias(leaf, (16,), (1,)), leaf.expand(2, 4, 4), leaf[1], leaf.unsqueeze(0), leaf.squeeze()]
    views += [leaf.as_strided((2, 2), (1, 1)), aten.alias(leaf)]

    assert {type(view.grad_fn).__name__ for view in views} == torch_private.VIEW_NODES
    assert all(map(is_from_leaf, views))
    assert type(leaf.expand_as(leaf).grad_fn.next_functions[0][0]).__name__ == torch_private.LEAF_NODE  # type: ignore[union-attr]
    assert type(leaf.to(torch.float64).grad_fn).__name__ == torch_private.CAST_NODE


def test_checkpoint_sets_hooks_of_its_own_module() -> None:
    packs: list[Any] = []

    def run(x: Tensor) -> Tensor:
        hooks = torch_private.top_saved_tensor_hooks(True)
        packs.append(hooks[0])
        return x.sin()

    torch.utils.checkpoint.checkpoint(run, torch.ones(1, requires_grad=True), use_reentrant=False)

    assert packs[0].__module__ == torch_private.CHECKPOINT_HOOKS


def test_marks_and_names_are_those_of_torch() -> None:
    compiled, disabled = torch.compile(lambda x: x, backend="eager"), torch.compiler.disable(lambda x: x)
    assert torch_private.DYNAMO in sys.modules
    assert hasattr(compiled, torch_private.COMPILED_FUNCTION_MARK)
    assert all(hasattr(disabled, mark) for mark in torch_private.UNTRACED_MARKS)

    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], fused=True)
    assert getattr(optimizer, torch_private.SCALES_IN_STEP_MARK) is True
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    setattr(optimizer, torch_private.STEPPED_MARK, True)
    scheduler.step()  # a warning is an error

    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert torch_private.JAGGED_VALUES in jagged.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    assert set(torch_private.MODULE_STATE) <= vars(nn.Module()).keys()
    assert all(hasattr(torch.Tensor, name) or hasattr(torch, name) for name in torch_private.READ_BY_MODULES)
    assert hasattr(torch, torch_private.ZEROING_ALL)


def test_parts_of_a_module_are_moved_by_a_method_of_their_own() -> None:
    model, moved = nn.Sequential(nn.Linear(2, 2)), list[object]()
    vars(model[0])[torch_private.MOVING_ALL] = moved.append

    model.to("meta")

    assert len(moved) == 1
    assert not model[0].weight.is_meta


def test_sharded_modules_and_tensors_are_recognised() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    tensor = pytest.importorskip("torch.distributed.tensor")
    sharded = type("FSDPLinear", (fsdp.FSDPModule, nn.Linear), {})

    assert fsdp.FSDPModule.__name__.startswith("FSDP")
    assert is_sharded_by_fsdp(object.__new__(fsdp.FullyShardedDataParallel))
    assert is_sharded_by_fsdp(object.__new__(sharded))
    assert not is_sharded_by_fsdp(nn.Linear(1, 1))
    assert tensor.DTensor.__name__ == "DTensor"
    assert inspect.isclass(nn.parallel.DistributedDataParallel)


def test_replica_is_refused_only_within_a_group_of_processes(take_away: Callable[[str], None]) -> None:
    take_away("active_replica")

    selection.refuse_replicated([])
