"""Act on weights: `LayerOffload` keeps those of layers in host memory, and streams them through slots on the device.

A layer's weights are one *chunk*: packed side by side, copied together. A *slot* is device memory for one chunk at a time.

The feature:

- `layer_offload`: `LayerOffload`
- `selection`: which modules are layers, and which models are refused
- `shares`: from `offload_ratio`, `budget` or `num_resident` to a `ResidencyPlan`; the training mode
- `choice`: `offload_ratio="auto"`: which steps are timed, and the plan that is chosen by them
- `timing`: times of one step: compute of each layer, copies, peak
- `claims`: which parameters are streamed, and by whom
- `stats`: `LayerStats`: bytes moved and held, and stalls

Weights in host memory:

- `chunks`: `LayerChunk`: what streams of one layer, its layout, its host copy, and where its bytes are
- `binding`: parameters and the bytes that they point at: in a slot, or the host copy
- `adoption`: parameters that the user has replaced, or given other data
- `host_copies`: `HostCopies`: the pinned host memory
- `disk_copies`: `DiskCopies`: frozen layers on a disk, and host buffers for reading ahead
- `placement`: tensors that do not stream: to the device and back

Weights from files, for a model on the meta device:

- `from_files`: reads each weight to where it is kept
- `checkpoint`: safetensors files
- `remaking`: buffers that no file has: made anew by the module's constructor

Streaming:

- `forwards`: hooks before and after forwards of the model, of layers, and of modules inside of them
- `streaming`: `Streamer`: fetches a layer when it is used, and prefetches those after it
- `slots`: `SlotRing`: device memory, and when each slot may be written to again
- `order`: the order of the layers in the last pass, which the next one is expected to have
- `inner_hooks`: hooks on modules inside of a layer, set aside while the layer runs
- `saving`: saved-tensor hooks in a layer's forward: a weight is saved as a reference to its layer
- `handles`: an object for a saved weight, for other contexts and to know whether a graph is alive

Gradients:

- `accumulation`: `Accumulation`: hooks that see gradients, and when one is complete
- `layer_accumulation`: the kind that hands over a layer's gradients together, for `train="host"`
- `parameter_accumulation`: the kind that hands over each by itself, for `train="fused"`
- `gradients`: `HostGradients`: `train="host"`, gradients are added up in host memory
- `gradient_buffers`: the host memory for them, and copies under way
- `fused`: `FusedSteps`: `train="fused"`, each parameter is stepped in its slot within the backward
- `stepped`: what `grad` is once a parameter was stepped so: it raises when it is used
- `optimizers`: questions to a user's optimizer: how much state it keeps, whether a step changed a group
- `scaler`: `GradScaler` for gradients in host memory
"""

from memkit.weights.layer_offload import LayerOffload
from memkit.weights.scaler import GradScaler
from memkit.weights.stats import LayerStats

__all__ = ["GradScaler", "LayerOffload", "LayerStats"]
