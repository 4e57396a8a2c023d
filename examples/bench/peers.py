"""TRL and torchtune as engines, and how their wheels are imported from files, without what they import beside the one module
that is timed.

pip download --no-deps --dest wheels trl torchtune
python examples/bench/bench_offload.py --wheels wheels
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from measuring import Engine
from torch import nn

_PACKAGES = ("trl", "trl.models", "torchtune", "torchtune.training")


def installed_peers(model: nn.Module) -> dict[str, Engine]:
    """Return the engines of other packages that can be imported and made here, by name; of the others, a warning says why they
    cannot."""
    found: dict[str, Engine] = {}
    for name, make in (("TRL", _trl), ("torchtune", _torchtune)):
        try:
            found[f"{name} OffloadActivations"] = make(model)
        except (ImportError, RuntimeError) as error:  # one that is installed may need a GPU
            warnings.warn(f"{name} is left out: {str(error).splitlines()[0]}", stacklevel=2)
    return found


def _trl(model: nn.Module) -> Engine:
    module = importlib.import_module("trl.models.activation_offloading")
    engine = module.OffloadActivations(use_pin_memory=True, use_streams=True)
    engine.update_model_params(model)
    return _again(engine)


def _torchtune(_: nn.Module) -> Engine:
    module = importlib.import_module("torchtune.training._activation_offloading")
    return _again(module.OffloadActivations(use_pin_memory=True, use_streams=True))


def _again(engine: AbstractContextManager[Any]) -> Engine:
    return lambda: engine


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
