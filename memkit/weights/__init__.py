"""Act on weights: `LayerOffload` keeps those of layers in host memory, and streams them through slots on the device.

A layer's weights are one *chunk*: packed side by side, copied together. A *slot* is device memory for one chunk at a time.

- `layer_offload`: `LayerOffload` and its `LayerStats`; `GradScaler` for gradients in host memory
- `selection`: which modules are layers, which models are refused, which share streams; the training mode

Weights in host memory:

- `chunks`: `LayerChunk`: the streamed parameters of a layer, their layout, and their place: a slot, or the host copy
- `host_copies`: the pinned memory or the disk of host copies; tensors that do not stream, to the device and back
- `from_files`: weights of a model on the meta device, read from safetensors files to their places

Streaming:

- `forwards`: hooks before and after forwards of the model, of layers, and of modules inside of them
- `streaming`: `Streamer`: fetches a layer when it is used, and those after it; a weight is saved as a reference to its layer
- `slots`: `SlotRing`: device memory, and when each slot may be written to again

Gradients:

- `gradients`: `Accumulation`: when a gradient is complete; `HostGradients`: `train="host"`, they are added up in host memory
- `fused`: `FusedSteps`: `train="fused"`, each parameter is stepped in its slot within the backward
"""

from memkit.weights.layer_offload import GradScaler, LayerOffload, LayerStats

__all__ = ["GradScaler", "LayerOffload", "LayerStats"]
