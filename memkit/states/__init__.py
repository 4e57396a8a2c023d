"""Act on optimizer states: `StateOffload` keeps them in host memory, and steps the user's optimizer piece by piece.

A *piece* is the states of some parameters, which are copied to the device together, stepped, and copied back. A parameter that
is larger than a piece is cut into *windows*.

- `state_offload`: `StateOffload`: hooks around `optimizer.step()`, `wait`, `accumulate`, `close`; `StateStats`
- `asked`: checks of its arguments, of the optimizer's parameters and groups, and of gradients; which optimizers have one
- `trial`: small steps of the class: are parameters independent, which states are there, is the step elementwise
- `members`: the optimizer's parameters now, and the pieces that they are in

What moves:

- `pieces`: `Piece`: where its states are, in host memory and in a slot; `StateRecord`: what is known of one parameter
- `windows`: `CutPiece` and its `Window`s: a large parameter, moved in flat ranges of elements
- `packing`: states side by side in one range of bytes; tensors that wrap others; float32 copies
- `shards`: parameters that are `DTensor`s: their local tensors are stepped
- `memory`: `HostStates`, pinned host memory; `StateSlots`, device memory that pieces use in turn, and the copies
- `on_disk`: `DiskStates`: states on a disk between steps, and the host buffers that they pass through
- `at_rest`: what `optimizer.state` has between steps: adopting states of others, giving all back, saving and loading

A step:

- `stepping`: `Stepping`: one step over all pieces: prefetch, order, and recovery of a step that failed
- `one_step`: one call of the optimizer's `step` made of several: what each writes to the groups is written once
- `device_steps`: stepping a piece in its slot, with undo if that fails
- `host_steps`: stepping a piece on the host, in a thread
- `host_routes`: gradients and parameters on their way to the host and back; hashes that tell of writes by others
- `in_backward`: `when="backward"`: each parameter once its gradient is complete, also those that a `LayerOffload` streams
- `shard_steps`: the same for shards in host memory, in a thread
- `overlap`: `overlap_forward=True`: the step runs beside the next forward
"""

from memkit.states.state_offload import StateOffload, StateStats

__all__ = ["StateOffload", "StateStats"]
