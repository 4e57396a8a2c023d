"""Let saved tensors leave for host memory, and have them back: the moving stage.

Deciding as the step goes:

- `stage`: what is done with each saved tensor
- `ratio`: which storages leave under a ratio
- `window`: when device memory is freed, and what is fetched ahead
- `changes`: a mark of the user's that comes after the save
- `figures`: figures for `memkit.stats`

Following a schedule:

- `steady`: when a forward may follow one
- `schedule`: `Schedule`: arrays of what is due at each save and each request
- `placement`: its copies, from and to the host memory that a forward holds
- `scheduled`: a forward that follows one, and its backwards
- `scheduled_saves`: its saves
- `scheduled_sends`: its copies to the host, and when device memory is freed
- `scheduled_fetches`: its copies back
"""
