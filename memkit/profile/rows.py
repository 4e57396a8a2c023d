"""Makes the rows of a report from what the runs found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from memkit.profile.records import ModuleRecord
from memkit.profile.saves import SavedStorages
from memkit.profile.signatures import Signatures
from memkit.profile.storage_log import StorageLog
from memkit.profile.tree import Mark, ModuleTree, children_of

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the runs of a profile found. Mappings are by the index of a module."""

    saves: SavedStorages
    signatures: Signatures
    num_calls: Mapping[int, int]
    checkpointed: set[int]
    under_other_hooks: set[int]
    backend_dependent: set[int]
    written: tuple[str, ...]
    before_bytes: int | None
    forward_peak_bytes: int | None
    backward_peak_bytes: int | None
    reserved_peak_bytes: int | None
    forward_peaks: Mapping[int, int]
    backward_peaks: Mapping[int, int]
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    storages: StorageLog | None = None
    """What was on the device at each op; None without a backward, and if ops can't be seen."""
    gathered_bytes: int | None = None
    """See `ShardInfo`; also None if no parameter is gathered."""


def module_records(tree: ModuleTree, found: Found) -> tuple[ModuleRecord, ...]:
    """Return the rows: each module of the tree, and what was done outside of any."""
    parents = [*(node.parent for node in tree.nodes), None]
    below = children_of(parents)
    saved = found.saves.counts()
    self_param_bytes = {index: node.self_param_bytes for index, node in enumerate(tree.nodes)}
    self_host_param_bytes = {index: node.self_host_param_bytes for index, node in enumerate(tree.nodes)}
    self_bytes = {index: count.num_bytes for index, count in saved.items()}
    param_bytes = _with_children(self_param_bytes, below)
    host_param_bytes = _with_children(self_host_param_bytes, below)
    activation_bytes = _with_children(self_bytes, below)
    backward_s = _with_children(found.backward_s, below)
    backward_peaks = _highest_with_children(found.backward_peaks, below)
    rows = []
    for index in range(len(parents)):
        node = tree.nodes[index] if index < tree.outside else None
        inputs, outputs, dtype = found.signatures.first(index)
        count = saved.get(index)
        rows.append(
            ModuleRecord(
                fqn=tree.fqn(index),
                type_name="" if node is None else type(node.module).__name__,
                parent=parents[index],
                depth=0 if node is None else node.depth,
                num_calls=found.num_calls.get(index, 0),
                param_bytes=param_bytes.get(index, 0),
                host_param_bytes=host_param_bytes.get(index, 0),
                activation_bytes=activation_bytes.get(index, 0),
                self_bytes=self_bytes.get(index, 0),
                num_storages=0 if count is None else count.num_storages,
                num_saves=0 if count is None else count.num_saves,
                input_shapes=inputs,
                output_shapes=outputs,
                num_signatures=found.signatures.num_kinds(index),
                dtype=dtype,
                peak_bytes=found.forward_peaks.get(index),
                forward_s=found.forward_s.get(index),
                backward_s=backward_s.get(index),
                backward_peak_bytes=backward_peaks.get(index),
                marks=(() if node is None else node.marks) + _marks(index, found),
            )
        )
    return tuple(rows)


def _marks(index: int, found: Found) -> tuple[str, ...]:
    marks = {
        Mark.CHECKPOINTED: found.checkpointed,
        Mark.OTHER_HOOKS: found.under_other_hooks,
        Mark.BACKEND_DEPENDENT: found.backend_dependent,
    }
    return tuple(mark.value for mark, indices in marks.items() if index in indices)


def _with_children(values: Mapping[int, _Number], below: list[list[int]]) -> dict[int, _Number]:
    sums = dict(values)
    for index in reversed(range(len(below))):  # children come after their parent
        there = [sums[child] for child in below[index] if child in sums]
        if there:
            sums[index] = sums.get(index, 0) + sum(there)
    return sums


def _highest_with_children(values: Mapping[int, int], below: list[list[int]]) -> dict[int, int]:
    highest = dict(values)
    for index in reversed(range(len(below))):
        there = [highest[child] for child in (index, *below[index]) if child in highest]
        if there:
            highest[index] = max(there)
    return highest
