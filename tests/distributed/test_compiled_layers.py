"""Layers that are compiled and sharded: contexts inside them keep the bits. In one process; on two see test_two_ranks."""

from __future__ import annotations

import pytest

from tests.compiling import FORMS, WITH_COMPILED
from tests.distributed import compiled_layers

pytestmark = WITH_COMPILED


@pytest.mark.covering(1)
@pytest.mark.parametrize(("form", "order", "where", "context"), compiled_layers.RUNS)
def test_contexts_within_compiled_layers(one: None, form: str, order: str, where: str, context: str) -> None:
    compiled_layers.check_same(form, order, where, context)


@pytest.mark.parametrize("order", compiled_layers.ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_compiled_model_whose_shards_are_on_the_host(one: None, form: str, order: str) -> None:
    compiled_layers.check_whole(form, order)
