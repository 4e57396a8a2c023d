"""Running a model without data, on the meta device, as a target ("cuda" or "cpu") would run it.

`twins.py` stands tensors without data in for those of a model. `target.py` makes composite operations take the path that the
target takes: the meta device by itself always takes the most general one. `autocast.py`, `attention.py` and `kernels.py` hold
the differences; `dtypes.py` knows what the target refuses.
"""

from memkit.profile.simulate.dtypes import MixedDtypesError
from memkit.profile.simulate.kernels import TargetKernels
from memkit.profile.simulate.target import TARGETS, TargetMode
from memkit.profile.simulate.twins import META, MetaTwins, MixedDevices

__all__ = ["META", "TARGETS", "MetaTwins", "MixedDevices", "MixedDtypesError", "TargetKernels", "TargetMode"]
