"""Let saved tensors leave for host memory, and have them back: the moving stage.

Deciding as the step goes:

- `moving_stage`: what is done with each saved tensor, which leave under a ratio, and when a forward may follow a schedule
- `window`: when device memory is freed, and what is fetched ahead

Following a schedule:

- `schedule`: `Schedule`: arrays of what is due at each save and each request, and its copies
- `scheduled`: a forward that follows one, its saves and its backwards
"""
