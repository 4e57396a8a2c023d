"""Every private name of torch that memkit uses, each with its purpose and the features that stop without it.

A name is looked up at its first use (PEP 562), and is a plain global of this module from then on: write
`torch_private.backward_task()`, and never import a name from here. If torch lacks a name, `MissingTorchNameError` says so, and
all else goes on. memkit's overrides in torch's classes are listed here as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memkit.errors import MissingTorchNameError

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode


class Feature(Enum):
    """Features that need private names. The first three look up all of their names before they begin: see `require`."""

    OFFLOAD = "CPUOffload"
    REMAT = "Rematerialize"
    LAYERS = "LayerOffload"
    PURE_OPS = "Rematerialize(pure_ops=...)"
    REPLICAS = "LayerOffload within DistributedDataParallel"
    SHARDED = "Rematerialize of what FSDP2 has sharded"
    SCALER = "a GradScaler with LayerOffload"
    PROFILE = "profile_memory"
    META = 'profile_memory(device="meta")'
    SPARSE = "what memkit does with sparse tensors"


class Kind(Enum):
    VALUE = "what torch has under that name"
    FIELD = "reads the attribute of what it is called with: whether there is one is asked of the class, once"
    SETTER = "sets it"
    INSTANCE_FIELD = "reads an attribute that the class does not show: whether there is one is asked each time"


@dataclass(frozen=True, slots=True)
class PrivateName:
    symbol: str
    purpose: str
    features: tuple[Feature, ...]
    kind: Kind = Kind.VALUE
    sample: str = ""  # for an attribute that only instances have: the same attribute of some instance

    def find(self) -> Any:
        if self.kind is Kind.INSTANCE_FIELD:
            return self._read
        try:
            found = look_up(self.sample or self.symbol)
        except AttributeError:
            raise self.missing() from None
        if self.kind is Kind.SETTER:
            return functools.partial(setattr, look_up(self.symbol.rpartition(".")[0]), self._attribute)
        return attrgetter(self._attribute) if self.kind is Kind.FIELD else found

    def missing(self) -> MissingTorchNameError:
        needing = ", ".join(feature.value for feature in self.features) or "memkit"
        return MissingTorchNameError(
            f"{needing} {'need' if len(self.features) > 1 else 'needs'} {self.symbol} ({self.purpose}); found torch "
            f"{torch.__version__}, which does not have it. Install an older torch, or a newer memkit",
            symbol=self.symbol,
        )

    @property
    def _attribute(self) -> str:
        return self.symbol.rpartition(".")[2]

    def _read(self, instance: object) -> Any:
        try:
            return getattr(instance, self._attribute)
        except AttributeError:
            raise self.missing() from None


def look_up(symbol: str) -> Any:
    parts = symbol.split(".")
    found: Any = torch
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            if isinstance(found, type) and part in getattr(found, "__annotations__", ()):
                return None  # a field that is set when an instance is made
            if isinstance(found, ModuleType):
                with suppress(ImportError):
                    import_module(".".join(parts[:number]))
        found = getattr(found, part)
    return found


def __getattr__(name: str) -> Any:  # torch has no types for private names
    private = NAMES.get(name)
    if private is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = private.find()
    return found


_complete = set[Feature]()  # features all of whose names are there. In a compiled function Dynamo warns of `functools.cache`


def require(feature: Feature) -> None:
    if feature in _complete:
        return
    for name, private in NAMES.items():
        if feature in private.features and name not in globals():
            globals()[name] = private.find()
    _complete.add(feature)


@functools.cache
def known(*names: str) -> tuple[Any, ...]:
    """Return the given names of this module that torch has: a missing op needs no handling."""
    found = []
    for name in names:
        with suppress(MissingTorchNameError):
            found.append(globals().get(name) or NAMES[name].find())
    return tuple(found)


# Types of the names

backward_task: Callable[[], int]
base_of: Callable[[Tensor], Tensor | None]
dual_level_of: Callable[[ModuleType], int]
is_wrapper: Callable[[Any], bool]
node_number: Callable[[], int]
num_dispatch_modes: Callable[[], int]
num_storage_users: Callable[[int], int]
packet_name: Callable[[OpOverloadPacket], str]
raw_stream: Callable[[int], int]
storage_address: Callable[[torch.UntypedStorage], int]
top_saved_tensor_hooks: Callable[[bool], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None]
unscale_grads: Callable[..., dict[torch.device, Tensor]]
version_of: Callable[[Tensor], int]

_OFFLOAD, _REMAT, _LAYERS, _PROFILE, _META = Feature.OFFLOAD, Feature.REMAT, Feature.LAYERS, Feature.PROFILE, Feature.META
_CONTEXTS = (_OFFLOAD, _REMAT, _LAYERS)
_ALL = (*_CONTEXTS, _PROFILE)


def _of(symbol: str, purpose: str, *features: Feature, kind: Kind = Kind.VALUE, sample: str = "") -> PrivateName:
    return PrivateName(symbol, purpose, features, kind, sample)


_field, _setter = functools.partial(_of, kind=Kind.FIELD), functools.partial(_of, kind=Kind.SETTER)
_instance_field = functools.partial(_of, kind=Kind.INSTANCE_FIELD)
_AUTOGRAD = "torch._C._autograd"
_DISPATCH = "torch.utils._python_dispatch"
_EVAL_FRAME = "torch._C._dynamo.eval_frame"
_ATEN = "torch.ops.aten"
_MODULE = "torch.nn.Module"
SWITCHES = ("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")
ATTENTIONS = ("flash", "mem_efficient", "cudnn", "math")

NAMES: dict[str, PrivateName] = {
    # What autograd saves, and which backward runs
    "top_saved_tensor_hooks": _of(f"{_AUTOGRAD}._top_saved_tensors_default_hooks", "the saved-tensor hooks on top", *_ALL),
    "push_saved_tensor_hooks": _of(f"{_AUTOGRAD}._push_saved_tensors_default_hooks", "to put hooks back on top", *_ALL),
    "pop_saved_tensor_hooks": _of(f"{_AUTOGRAD}._pop_saved_tensors_default_hooks", "to take hooks off", *_ALL),
    "backward_task": _of("torch._C._current_graph_task_id", "which backward runs, -1 outside of one", *_CONTEXTS, _META),
    "node_number": _of(f"{_AUTOGRAD}._get_sequence_nr", "one number for all that a graph node saves", *_ALL),
    "node_number_of": _field(
        "torch.autograd.graph.Node._sequence_nr",
        *("when a graph node was made", _PROFILE),
        sample="torch._C._functions.AccumulateGrad._sequence_nr",
    ),
    "AccumulateGrad": _of("torch._C._functions.AccumulateGrad", "to tell the leaves of a graph", _PROFILE),
    "profiler_is_on": _of(f"{_AUTOGRAD}._profiler_enabled", "to label what is done in a trace", *_CONTEXTS),
    "engine": _of("torch.autograd.Variable._execution_engine", "to be called when a backward has ended", *_CONTEXTS),
    "keeping_versions": _of("torch.autograd.grad_mode._unsafe_preserve_version_counter", "to put bytes back", _PROFILE),
    "post_accumulate_hooks": _field("torch.Tensor._post_accumulate_grad_hooks", "whether a backward steps", _PROFILE),
    # Tensors and storages
    "version_of": _field("torch.Tensor._version", "how often a tensor was written to", *_ALL),
    "base_of": _field("torch.Tensor._base", "what a tensor is a view of", *_CONTEXTS),
    "is_zero_tensor": _of("torch.Tensor._is_zerotensor", "to tell zeros without bytes", _OFFLOAD, _REMAT),
    "storage_address": _field("torch.UntypedStorage._cdata", "to tell storages apart", *_ALL),
    "foreach_copy": _of("torch._foreach_copy_", "to keep what a step may have to undo, in one call"),
    "raw_stream": _of("torch._C._cuda_getCurrentRawStream", "the current CUDA stream, without an object for it"),
    "sleep_on_device": _of("torch.cuda._sleep", "to have the host get ahead of the device"),
    "TensorGuards": _of("torch._C._dynamo.guards.TensorGuards", "to compare how tensors lie with how they did, in one call"),
    "num_storage_users": _of("torch._C._storage_Use_Count", "whether a slot is in use", _LAYERS),
    "set_conj": _of("torch._C._set_conj", "to read a tensor conjugated", *_CONTEXTS),
    "set_neg": _of("torch._C._set_neg", "to read a tensor negated", *_CONTEXTS),
    "sparse_indices": _of("torch.Tensor._indices", "where the elements of a sparse tensor are", Feature.SPARSE),
    "sparse_values": _of("torch.Tensor._values", "the elements of a sparse tensor", Feature.SPARSE),
    "is_wrapper": _of(f"{_DISPATCH}.is_traceable_wrapper_subclass", "whether a tensor is made of others", *_ALL),
    "make_wrapper_subclass": _of("torch.Tensor._make_wrapper_subclass", "to move what wraps other tensors", _LAYERS),
    "make_subclass": _of("torch.Tensor._make_subclass", "to stand in for a parameter", _META),
    "no_own_dispatch": _of("torch._C._disabled_torch_dispatch_impl", "whether a class says what ops do", *_CONTEXTS),
    # Dispatch modes, and running below them
    "DispatchMode": _of(f"{_DISPATCH}.TorchDispatchMode", "to see each op", _REMAT, _PROFILE),
    "dispatch_modes": _of(f"{_DISPATCH}._get_current_dispatch_mode_stack", "whether a mode is on", _REMAT, _PROFILE),
    "pop_dispatch_mode": _of("torch._C._pop_torch_dispatch_stack", "to leave a mode", _REMAT, _PROFILE),
    "push_dispatch_mode": _of("torch._C._push_on_torch_dispatch_stack", "to leave a mode below others", _REMAT, _PROFILE),
    "set_in_mode": _setter(f"{_DISPATCH}._is_in_torch_dispatch_mode", "to leave a mode", _REMAT, _PROFILE),
    "set_in_mode_of_program": _setter(f"{_DISPATCH}._is_in_non_infra_torch_dispatch_mode", "to leave a mode", _REMAT, _PROFILE),
    "num_dispatch_modes": _of("torch._C._len_torch_dispatch_stack", "whether a mode would see a tensor made", *_ALL),
    "num_function_modes": _of("torch._C._len_torch_function_stack", "whether a default device is set", _REMAT),
    "dispatch_mode_at": _of("torch._C._get_dispatch_mode", "whether ops are traced", _REMAT),
    "DispatchModeKey": _of("torch._C._TorchDispatchModeKey", "whether ops are traced", _REMAT),
    "without_dispatch_modes": _of(f"{_DISPATCH}._disable_current_modes", "to hide ops from modes", *_CONTEXTS),
    "without_python_dispatch": _of("torch._C._DisableTorchDispatch", "to hide ops from modes and classes", *_CONTEXTS),
    "without_functions": _of("torch._C.DisableTorchFunction", "to replay below function modes", _REMAT),
    "without_subclass_functions": _of("torch._C.DisableTorchFunctionSubclass", "to alias any class", *_CONTEXTS),
    "without_autocast": _of("torch._C._DisableAutocast", "to replay below autocast", _REMAT),
    "without_functorch": _of("torch._C._DisableFuncTorch", "to replay below transforms", _REMAT),
    "without_autograd": _of("torch._C._AutoDispatchBelowAutograd", "to replay below autograd", _REMAT),
    "excluding_keys": _of("torch._C._ExcludeDispatchKeyGuard", "to replay below vmap", _REMAT),
    "key_named": _of("torch._C._parse_dispatch_key", "to replay below vmap", _REMAT),
    "DispatchKeySet": _of("torch._C.DispatchKeySet", "to replay below vmap", _REMAT),
    "DispatchKey": _of("torch._C.DispatchKey", "whether modes see a copy, or aliases share their version counter", *_CONTEXTS),
    "is_key_excluded": _of("torch._C._dispatch_tls_is_dispatch_key_excluded", "the same: whether modes see a copy", *_CONTEXTS),
    "dual_level_of": _field("torch.autograd.forward_ad._current_level", "not to record under an open one", *_CONTEXTS),
    "functorch_stack": _of("torch._C._functorch.get_interpreter_stack", "to refuse torch.func.grad", _REMAT, _LAYERS),
    "FunctorchTransform": _of("torch._C._functorch.TransformType", "to refuse torch.func.grad", _LAYERS),
    # Settings that change an op's result
    "fp32_precision_of": _of("torch._C._get_fp32_precision_getter", "to replay by the same kernels", _REMAT),
    **{
        name: _of(f"torch._C._{name}", "to replay by the same kernels", _REMAT)
        for name in (
            *(f"{verb}_{switch}" for switch in SWITCHES for verb in ("get", "set")),
            *(f"get_{kind}_sdp_enabled" for kind in ATTENTIONS),
            *(f"get_cublas_allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")),
        )
    },
    # Compiling
    "set_code_strategy": _of(f"{_EVAL_FRAME}.set_code_exec_strategy", "to keep hooks from being compiled", *_CONTEXTS),
    "FrameAction": _of(f"{_EVAL_FRAME}._FrameAction", "to keep hooks from being compiled", *_CONTEXTS),
    "FrameExecStrategy": _of(f"{_EVAL_FRAME}._FrameExecStrategy", "to keep hooks from being compiled", *_CONTEXTS),
    "set_shows_to_guards": _of(
        "torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals",
        *("to compile higher-order ops", _REMAT, _PROFILE),
    ),
    "shows_to_compiler": _of(f"{_DISPATCH}.is_in_any_mode_without_ignore_compile_internals", "for higher-order ops", _REMAT),
    "set_shows_to_compiler": _setter(
        f"{_DISPATCH}._is_in_any_mode_without_ignore_compile_internals", "to compile higher-order ops", _REMAT, _PROFILE
    ),
    "skips_dynamo": _of(f"{_DISPATCH}.TorchDispatchMode._should_skip_dynamo", "overridden by the recorder, where it is there"),
    "in_hop_compile": _of("torch._higher_order_ops.utils._in_hop_compile", "whether a higher-order op compiles"),
    "asks_modes_on_stack": _of(f"{_DISPATCH}.any_torch_dispatch_mode_on_stack", "whether Dynamo asks each mode"),
    "compile_counters": _of("torch._dynamo.utils.counters", "whether a call has compiled anything"),
    "code_when_compiled": _field(f"{_MODULE}._compiled_call_impl", "whether a module is compiled", _REMAT, _PROFILE),
    # Ops
    "OpOverload": _of("torch._ops.OpOverload", "to tell kinds of ops", _REMAT),
    "OpOverloadPacket": _of("torch._ops.OpOverloadPacket", "to tell kinds of ops", _REMAT),
    "HigherOrderOperator": _of("torch._ops.HigherOrderOperator", "to tell kinds of ops", _REMAT),
    "CustomOpDef": _of("torch._library.custom_ops.CustomOpDef", "to tell kinds of ops", _REMAT),
    "schema_of": _field(
        "torch._ops.OpOverload._schema", "what an op writes to", _REMAT, _PROFILE, sample=f"{_ATEN}.mul.Tensor._schema"
    ),
    "op_of_custom": _instance_field("torch._library.custom_ops.CustomOpDef._opoverload", "its name", Feature.PURE_OPS),
    "packet_name": _field(
        "torch._ops.OpOverloadPacket._qualified_op_name",
        *("its name", Feature.PURE_OPS),
        sample=f"{_ATEN}.mul._qualified_op_name",
    ),
    "higher_order_effect": _of("torch._higher_order_ops.effects._get_effect", "whether an op has one", Feature.PURE_OPS),
    "batch_norm_legit": _of(f"{_ATEN}._native_batch_norm_legit.default", "an op with statistics"),
    "batch_norm_legit_no_stats": _of(f"{_ATEN}._native_batch_norm_legit.no_stats", "the same without"),
    "to_copy": _of(f"{_ATEN}._to_copy.default", "to tell casts and moves"),
    "local_scalar": _of(f"{_ATEN}._local_scalar_dense.default", "an op that reads values"),
    "unique2": _of(f"{_ATEN}._unique2.default", "an op that reads values"),
    "prelu_kernel": _of(f"{_ATEN}._prelu_kernel.default", "an op with arguments of one dtype"),
    "euclidean_dist": _of(f"{_ATEN}._euclidean_dist.default", "an op with arguments of one dtype"),
    "cdist_forward": _of(f"{_ATEN}._cdist_forward.default", "an op with arguments of one dtype"),
    "index_put_impl": _of(f"{_ATEN}._index_put_impl_.default", "an op with arguments of one dtype"),
    "unsafe_index_put": _of(f"{_ATEN}._unsafe_index_put.default", "an op with arguments of one dtype"),
    "grouped_mm": _of(f"{_ATEN}._grouped_mm.default", "to take the dtypes that it takes with data"),
    "flash_attention_cpu": _of(f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu", "to save what the CPU's does", _META),
    "flash_attention": _of(f"{_ATEN}._scaled_dot_product_flash_attention", "to save what CUDA's attention does", _META),
    "efficient_attention": _of(f"{_ATEN}._scaled_dot_product_efficient_attention", "to save what CUDA's attention does", _META),
    "cudnn_attention": _of(f"{_ATEN}._scaled_dot_product_cudnn_attention", "to save what CUDA's attention does", _META),
    "safe_softmax": _of(f"{_ATEN}._safe_softmax", "to save what CUDA's attention does", _META),
    "fused_sdp_choice": _of("torch._fused_sdp_choice", "which attention this torch fuses", _META),
    "nn_functions": _of("torch._C._nn", "to pad as the target does", _META),
    "select_conv_backend": _of("torch._C._select_conv_backend", "which kernel the CPU would take", _META),
    "dispatch_registrations": _of("torch._C._dispatch_get_registrations_for_dispatch_key", "which ops autocast casts", _META),
    # Modules and their surroundings
    "parameters_of": _field(f"{_MODULE}._parameters", "to put another parameter in place", _REMAT, _LAYERS, _META),
    "buffers_of": _field(f"{_MODULE}._buffers", "to put another buffer in place", _REMAT, _LAYERS, _META),
    "children_of": _field(f"{_MODULE}._modules", "to find the parts of a module", _REMAT),
    "hooks_with_keywords": _of("torch.nn.modules.module._global_forward_hooks_with_kwargs", "to leave none of ours", _REMAT),
    "sharded_modules": _of("torch.distributed._composable_state._module_state_mapping", "to find them", Feature.SHARDED),
    "active_replica": _field("torch.nn.parallel.DistributedDataParallel._active_ddp_module", "to refuse it", Feature.REPLICAS),
    "parameters_of_replica": _instance_field(
        "torch.nn.parallel.DistributedDataParallel._module_parameters", "to refuse it", Feature.REPLICAS
    ),
    "scale_of": _instance_field("torch.amp.GradScaler._scale", "where the scale is", Feature.SCALER),
    "unscale_grads": _of("torch.amp.GradScaler._unscale_grads_", "to wait for the scale", Feature.SCALER),
    "tree_leaves": _of("torch.utils._pytree.tree_leaves", "to find tensors in what is passed", *_CONTEXTS, _PROFILE),
    "tree_map": _of("torch.utils._pytree.tree_map", "to replace tensors in what is passed", _PROFILE),
    "tree_flatten": _of("torch.utils._pytree.tree_flatten", "to replace tensors in what is passed", _REMAT, _META),
    "tree_unflatten": _of("torch.utils._pytree.tree_unflatten", "to replace tensors in what is passed", _REMAT, _META),
    "arg_tree_leaves": _of("torch.utils._pytree.arg_tree_leaves", "to find tensors in what an op is given", _META),
}

# Names of torch's classes, and marks that it reads or sets: recognised by name, so nothing can be looked up. A renamed one goes
# unnoticed; the tests of this file check each against the installed torch.

LEAF_NODE = "AccumulateGrad"  # a parameter's graph node: `CPUOffload` and `Rematerialize` keep the parameters that are saved
CAST_NODE = "ToCopyBackward0"  # the graph node of a cast: autocast keeps casts of parameters
_VIEWS = "T Transpose View UnsafeView ReshapeAlias Permute Expand Slice Select Unsqueeze Squeeze AsStrided Alias"
VIEW_NODES = frozenset(f"{name}Backward0" for name in _VIEWS.split())  # views' graph nodes: looked through for the other two
CHECKPOINT_HOOKS = "torch.utils.checkpoint"  # the module of a checkpoint's hooks: no context may be entered inside
GATHERED_MARK, COMPOSED_MARK = "_is_fsdp_managed_module", "__composable_api_state_key_"  # on gathered modules; of its state
FSDP_GROUP = ("_get_fsdp_state", "_fsdp_param_group")  # from a module to its FSDP2 group, which has all of these:
FSDP_GATHER, FSDP_PHASE, FSDP_BEGIN, FSDP_CONTEXT = "_all_gather_result", "_training_state", "_lazy_init", "_state_ctx"
FSDP_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
FSDP_SHARD, FSDP_GATHERED, LOCAL_TENSOR = "_sharded_param_data", "_unsharded_param", "_local_tensor"
FSDP_PARTS = ("unshard", "wait_for_unshard", "fsdp_params", "is_unsharded", "comm_ctx", "device_handle", "unshard_in_backward")
FSDP_REDUCE, FSDP_LANDED = "post_backward", "grad_offload_event"  # of a group, and of each parameter that is on the host
FSDP_INDICES, FSDP_SUMS, FSDP_TO_RUN = "_post_forward_indices", "_partial_reduce_output", "_modules_to_run_forward"
"""How FSDP2 gathers and reduces. Without one of these names it brings shards from the host by itself, and has no profile."""
JAGGED_VALUES = "_values"  # the one tensor of a jagged one that may leave
UNTRACED_MARKS = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": None}  # of functions Dynamo is not to look into
COMPILED_FUNCTION_MARK = "_torchdynamo_orig_callable"  # Dynamo sets it on a function that it compiles: read on modules
COMPILED_CALL, COMPILED_CALLER = "_compiled_call_impl", ("torch._dynamo.eval_frame", "compile_wrapper")
"""The attribute with a module's compiled code, and the function that calls it; `Rematerialize` stands around it."""
COMPILED_SAVER = "torch._functorch._aot_autograd"  # the modules that save for compiled code: refused where it is not known
TRANSFORMS = ("torch._functorch.apis", "torch._functorch.eager_transforms", "torch._functorch.vmap", "torch._vmap_internals")
DYNAMO, HIGHER_ORDER_OPS = "torch._dynamo", "torch._higher_order_ops.utils"  # loaded where anything, or an op, may compile
DYNAMO_CONFIG = "torch._dynamo.config"  # lets a trace run compiled code as plain Python: `memkit.profile.partitions`
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""A module's hooks; with `_global` in front, the hooks of all modules. A region has none of the user's."""
SCALES_IN_STEP_MARK = "_step_supports_amp_scaling"  # a fused optimizer's own mark: `GradScaler` scales for it
STEPPED_MARK = "_opt_called"  # a scheduler makes an optimizer's `step()` set it, and warns if its own comes first
MODULE_STATE = ("_parameters", "_buffers", "_modules")  # no tensors of the module's own: a profile without data leaves them
READ_BY_MODULES = frozenset({"_is_view", "_has_compatible_shallow_copy_type"})  # of a gradient whose module is moved
ZEROING_ALL = "_foreach_zero_"  # `zero_grad` zeroes many gradients by it: the same
MOVING_ALL = "_apply"  # moves or casts a module, also as a part of another: one that streams stays in place
