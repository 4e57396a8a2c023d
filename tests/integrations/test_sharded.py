"""Trainers that shard the model with FSDP2 themselves: each feature keeps the bits, and the first FSDP is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memkit.integrations.trainer import _fsdp_version
from tests.distributed.groups import Failed, Found, run_ranks
from tests.integrations import sharded
from tests.integrations.cases import MARKS, MISSING

for name in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(name, reason=MISSING)

pytestmark = MARKS


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(2, str(tmp_path_factory.mktemp("sharded")), sharded.WORKS)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sharded.WORKS)
def test_features_keep_the_bits(found: Found, trainer: str) -> None:
    for rank, outcome in enumerate(found[trainer]):
        assert not isinstance(outcome, Failed), f"rank {rank}: {outcome}"
        for name in sharded.FEATURES:
            moved = [number for key, number in outcome[name].items() if "moved" in key or "recomputed" in key]
            assert sum(moved) > 0


@pytest.mark.parametrize(
    ("given", "environment", "version"),
    [
        ({}, {}, None),
        ({"fsdp": True, "fsdp_plugin_args": {"fsdp_version": 2}}, {}, 2),
        ({"fsdp": [True], "fsdp_config": {"version": 2}}, {}, 2),
        ({"fsdp": "full_shard", "fsdp_config": {"fsdp_version": "1"}}, {}, 1),
        ({"fsdp": "full_shard", "fsdp_config": None}, {}, 1),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, 2),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, 1),
    ],
)
def test_version_is_that_of_the_settings(
    given: Any, environment: dict[str, str], version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)

    assert _fsdp_version(SimpleNamespace(**given)) == version  # type: ignore[arg-type]
