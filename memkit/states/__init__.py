"""Act on optimizer states: `StateOffload` keeps them in host memory, and steps the user's optimizer piece by piece.

A *piece* is the states of some parameters, which are copied to the device together, stepped, and copied back. A parameter that
is larger than a piece is cut into *windows*.

The feature:

- `state_offload`: `StateOffload`: hooks around `optimizer.step()`, `wait`, `accumulate`, `close`
- `asked`: checks of its arguments, of the optimizer's parameters and groups, and of gradients
- `opened`: which optimizers have a `StateOffload`; hooks that do not keep one alive
- `stats`: `StateStats`: bytes moved and held

Whether an optimizer can be stepped in pieces:

- `trial`: steps small tensors together and one by one, and compares: are parameters independent, which states are there
- `cut_trial`: the same for a tensor and for windows of it: is the step elementwise
- `generators`: random number generators: a step that draws from one must keep its order

What moves:

- `records`: `StateRecord`: what is known of one parameter
- `members`: the optimizer's parameters now, and the pieces that they are in
- `pieces`: `Piece`: where its states are, in host memory and in a slot
- `windows`: `CutPiece` and its `Window`s: a large parameter, moved in flat ranges of elements
- `window_layouts`: byte ranges of a window's states in host memory and in a slot
- `packing`: offsets of states side by side in one range of bytes; tensors that wrap others (8-bit states)
- `shards`: parameters that are `DTensor`s: their local tensors are stepped

Memory:

- `host_memory`: `HostStates`: pinned host memory for the states
- `slots`: `StateSlots`: device memory that pieces use in turn, and the copies to and from it
- `on_disk`: `DiskStates`: states on a disk between steps
- `disk_ring`: the host buffers that states on a disk pass through
- `at_rest`: what `optimizer.state` has between steps: adopting states of others, and giving all back
- `saving`: `state_dict` and `load_state_dict` hooks

A step:

- `stepping`: `Stepping`: one step over all pieces: prefetch, order, and recovery of a step that failed
- `one_step`: one call of the optimizer's `step` made of several: what each writes to the groups is written once
- `device_steps`: stepping a piece in its slot, with undo if that fails
- `host_steps`: stepping a piece on the host, in a thread
- `host_routes`: where gradients and parameters lie while they are copied to the host and back
- `given`: the parameters, gradients and states that a step on the host is given
- `masters`: float32 copies of parameters take over what others write to the parameters
- `fingerprints`: 64-bit hashes of parameters on the device, by which such writes are seen

Other times to step:

- `in_backward`: `when="backward"`: each parameter once its gradient is complete
- `in_layers`: the same for parameters that `LayerOffload(train="fused")` streams
- `shard_steps`: the same for shards in host memory, which are stepped there
- `shard_thread`: the thread that does that, and what becomes of a step that fails
- `noted_options`: learning rates and other options of the groups, as the backward has stepped with them: later changes raise
- `overlap`: `overlap_forward=True`: the step runs beside the next forward
- `stepped`: what `grad` is once a parameter was stepped in the backward: it raises when it is used
"""

from memkit.states.state_offload import StateOffload
from memkit.states.stats import StateStats

__all__ = ["StateOffload", "StateStats"]
