"""Code that all rooms share. Files import each other here only downwards in this list.

Plain Python:

- `features`: attachments of models, threads that profile, and contexts that are entered once
- `interrupts`: the contract for exceptions inside memkit, and the tools that several rooms use for it
- `forks`: threads that features keep, and the error of a forked process, which has none of them
- `agreement`: raises an error of one rank on every rank
- `sizes`: bytes and shares as text, alignment and pages
- `schemas`: kind and version of memkit's JSON
- `extras`: optional libraries, and how to install a missing one
- `terminal`: text and tables as wide as the terminal

Calls and saved tensors:

- `hooks`: all hooks on models, graph nodes, the engine and optimizers
- `calls`: running forwards, and the clean-up when one ends
- `backwards`: the running backward, the tensors that it has reached, and its end
- `compiled`: compiled modules, and uncompiled code around their calls
- `sequentials`: neighboring children of a `Sequential`, called as one module
- `kept`: handles of saved tensors that stay, were passed to outer hooks, or wrap others

Tensors and torch:

- `owners`: storages whose contents change, such as slots, and the parameters that stream through them
- `tensors`: bytes of tensors by storage, and tensors that wrap others
- `modes`: a dispatch mode that stays consistent at Ctrl-C
- `torch_state`: questions about torch's state, and labels for its profiler
- `torch_private`: every private name of torch in use, and the features that stop without it
"""
