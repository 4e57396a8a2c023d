"""Lets wheels of TRL and torchtune be imported from files, without what they import beside the one module that is timed.

pip download --no-deps --dest wheels trl torchtune
python examples/bench/bench_offload.py --wheels wheels
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

_PACKAGES = ("trl", "trl.models", "torchtune", "torchtune.training")


def add_wheels(folder: Path) -> None:
    """Make `trl.models.activation_offloading` and `torchtune.training._activation_offloading` importable from wheels.

    Their packages' own `__init__` are not run. What the two modules name of torchao and torchtune (the classes of quantized and
    of tied weights, which the models here do not have) is replaced by classes without instances, while they are imported.
    """
    for wheel in folder.glob("*.whl"):
        for name in _PACKAGES:
            if wheel.name.startswith(f"{name.split('.')[0]}-"):
                package = _stub(name)
                package.__path__ = [f"{wheel}/{name.replace('.', '/')}"]
    if "trl" in sys.modules:
        importlib.import_module("trl.models.activation_offloading")
    if "torchtune" in sys.modules:
        _stub("torchao", dtypes=_stub("torchao.dtypes", nf4tensor=_stub("torchao.dtypes.nf4tensor", NF4Tensor=_no_instances())))
        _stub("torchtune.modules", TiedLinear=_no_instances())
        _stub("torchtune.utils", get_logger=lambda *_: types.SimpleNamespace(info=print, warning=print))
        importlib.import_module("torchtune.training._activation_offloading")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:  # others ask whether it is installed
            del sys.modules[name]


def _no_instances() -> type:
    return type("NoInstances", (), {})


def _stub(name: str, **contents: object) -> types.ModuleType:
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__dict__.update(contents)
    return module
