"""What all rooms share. Files import each other here only downwards in this list.

Plain Python:

- `features`: what is attached to which model, which threads profile, and objects that are entered once
- `interrupts`: the contract for exceptions inside memkit, and the tools that several rooms use for it
- `forks`: threads that features keep, and the error of a forked process, which has none of them
- `agreement`: raises an error of one rank on every rank
- `sizes`: bytes and shares as text, alignment and pages
- `schemas`: JSON that memkit has written: its kind and version
- `extras`: libraries that only some of memkit needs, and how to install a missing one
- `terminal`: text and tables as wide as the terminal

Calls and saved tensors:

- `hooks`: all hooks on models, graph nodes, the engine and optimizers
- `calls`: which forwards are running, and what is undone when one ends
- `backwards`: which backward is running, what it has reached, and when it ends
- `compiled`: which modules are compiled, and code around their calls that is not
- `sequentials`: neighboring children of a `Sequential`, called as one module
- `kept`: handles of saved tensors that stay, were passed to outer hooks, or wrap others

Tensors and torch:

- `owners`: storages whose contents change, such as slots, and the parameters that stream through them
- `tensors`: bytes of tensors by storage, and tensors that wrap others
- `modes`: a dispatch mode that stays consistent at Ctrl-C
- `torch_state`: questions about torch's state, and labels for its profiler
- `torch_private`: every private name of torch that is used, and what stops without it
"""
