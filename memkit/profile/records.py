"""What a profile lists, as frozen values: rows, saved storages, and where and how it was taken."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

Shapes = tuple[tuple[int, ...], ...]


class SavedCategory(str, Enum):
    """What a saved storage is. Parameters and buffers are not listed: they exist with or without a backward."""

    ACTIVATION = "activation"
    """Made during the forward and kept for the backward."""
    INPUT = "input"
    """Passed to the model by the caller, who may hold it as well. Counted as an activation."""
    PARAM_CAST = "param cast"
    """A copy of a parameter or buffer in another dtype, as made by autocast. Not counted as an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorRecord:
    """One version of one storage that autograd saved for backward.

    Two records with the same `storage` are the same bytes, written to in between; the bytes are counted at the first.
    Times are None on the meta device, and `needed_*` without a backward or where the backward never asked.
    """

    storage: int
    """Which storage, numbered in the order of first saves."""
    version: int
    """How often it had been written to in place since its first save (by `Tensor._version`)."""
    storage_bytes: int
    """Bytes of the whole storage."""
    category: SavedCategory
    """What the storage is."""
    module: str
    """The innermost module whose forward ran at the first save; "(outside modules)" if none did."""
    dtype: str
    """Dtype of the tensor at the first save."""
    save_ordinals: tuple[int, ...]
    """For each save, its ordinal among all saves that are listed, so without those of parameters and buffers."""
    shapes: Shapes
    """For each save, the shape of the tensor."""
    saved_at_s: float | None
    """Seconds from the start of the forward to the first save, on the device's clock."""
    needed_position: int | None
    """Number of its first use among all uses, in the backward, of what is listed."""
    needed_at_s: float | None
    """Seconds from the start of the backward to its first use, on the device's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord:
    """One row: what one module keeps, and what its calls took.

    Bytes of a row are inclusive: the module's own plus those of the modules registered under it, so `self_bytes` of all rows
    add up to the total exactly. Times and peaks are of the module's calls, whatever these called; None where nothing was
    measured.
    """

    fqn: str
    """The module's qualified name in the model; "(model)" and "(outside modules)" for these two rows."""
    type_name: str
    """The class of the module."""
    parent: int | None
    """Index of the parent's row, None for the model and for "(outside modules)"."""
    depth: int
    """0 for the model, 1 for its children, and so on."""
    num_calls: int
    """How often its forward was called."""
    param_bytes: int
    """Bytes of the distinct storages of its parameters; tied ones count where they are registered first."""
    host_param_bytes: int = 0
    """Of these, bytes in host memory: of weights that a `LayerOffload` streams."""
    activation_bytes: int
    """Bytes of the distinct storages that autograd saved in the module and those under it."""
    self_bytes: int
    """Bytes of the storages first saved while this module was the innermost one running."""
    num_storages: int
    """How many storages `self_bytes` counts."""
    num_saves: int
    """How many times those storages were saved."""
    input_shapes: Shapes
    """Shapes of the tensors that its first call was given."""
    output_shapes: Shapes
    """Shapes of the tensors that its first call returned."""
    num_signatures: int
    """How many different pairs of input and output shapes it was called with; the shapes shown are the first."""
    dtype: str
    """Dtype of its first output."""
    peak_bytes: int | None
    """Highest allocation during a call, minus what was allocated before the call; the maximum over calls."""
    forward_s: float | None
    """Seconds of all calls together."""
    backward_s: float | None
    """Seconds in which the backward ran this module's operations, or those of modules under it."""
    backward_peak_bytes: int | None
    """Highest allocation while it did, minus what was allocated before the step."""
    marks: tuple[str, ...]
    """What to know about the row: "streamed", "checkpointed", "compiled", "other hooks", "backend-dependent", "+1 alias"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Where and how a profile was taken."""

    model: str
    """Type of the model."""
    num_modules: int
    """Modules of the model, itself included."""
    fingerprint: str
    """Digest of the names, types and parameter shapes of the modules: equal for models that are built alike."""
    device: str
    """The device that the run was on, such as "cuda:0" or "meta"."""
    device_name: str
    """The name of the hardware, such as "NVIDIA H200"."""
    target: str
    """Whose kernels a run on the meta device imitated; the device itself otherwise."""
    training: bool
    """Whether the model was in train mode."""
    autocast: str
    """Dtype of autocast around the call ("bfloat16"), "" if it was off."""
    backward: bool
    """Whether a backward was run."""
    torch_version: str
    """The version of torch."""
    python_version: str
    """The version of Python."""
    allocator_config: str
    """`PYTORCH_ALLOC_CONF`, or `PYTORCH_CUDA_ALLOC_CONF`; "" if neither is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """How much of a sharded model one rank has, after `memkit.shard` or `fully_shard`."""

    rank: int
    """The rank of this process."""
    num_ranks: int
    """The number of ranks of the process group."""
    num_shards: int
    """How many ranks each parameter is split between: fewer than `num_ranks` if shards are replicated."""
    shard_bytes: int
    """Bytes of this rank's part of the parameters. `MemoryReport.param_bytes` also has the padding of the last shard."""
    whole_bytes: int
    """Bytes of all these parameters unsharded."""
    gathered_bytes: int | None
    """Most bytes of unsharded parameters that were gathered at once, with the communication buffers. None if `torch.compile`
    runs a part of the model, whose inside can't be seen."""
