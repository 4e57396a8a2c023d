"""One budget for the device: which values of a step stay, leave for host memory, or are recomputed.

- `problem`: `Problem`: a traced step, and what may be done with each value
- `simulate`: seconds and bytes of a step under one action for each value
- `search`: finds plans, and makes them better by single changes
- `bound`: a linear program: no plan is faster
- `planning`: `JointPlanner`: a budget in, a plan or an error out
"""
