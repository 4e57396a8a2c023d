"""Act on optimizer states: `StateOffload` keeps them in host memory, and steps the user's optimizer piece by piece.

A *piece* is the states of some parameters: copied to the device together, stepped, and copied back. A parameter larger than a
piece is cut into *windows*.

- `state_offload`: `StateOffload`, with the hooks around `optimizer.step()`; its parameters now, and their pieces
- `asked`: checks of its arguments, of the optimizer's parameters and groups, and of gradients
- `trial`: small steps of the class: are parameters independent, which states are there, is the step elementwise

What moves:

- `pieces`: `Piece`: where its states are; `StateRecord`: one parameter's record; `CutPiece`: a large one, moved in `Window`s
- `packing`: states side by side in one range of bytes; tensors that wrap others, as shards do; float32 copies
- `memory`: `HostStates`, pinned host memory; `StateSlots`, device memory that pieces use in turn; `DiskStates`, on a disk
- `at_rest`: `optimizer.state` between steps: adopting foreign states, giving all back, saving and loading

A step:

- `stepping`: `Stepping`: one step over all pieces: prefetch, order, recovery; `overlap_forward=True`: beside the next forward
- `one_step`: one `step` of the optimizer made of several: their writes to the groups are written once
- `device_steps`: stepping a piece in its slot, with undo if that fails
- `host_steps`: stepping a piece on the host, in a thread; the way there and back; hashes that find foreign writes
- `in_backward`: `when="backward"`: each parameter once its gradient is complete, also those that a `LayerOffload` streams
- `shard_steps`: the same for shards in host memory, in a thread
"""

from memkit.states.state_offload import StateOffload, StateStats

__all__ = ["StateOffload", "StateStats"]
