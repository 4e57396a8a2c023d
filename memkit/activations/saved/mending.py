"""Repairs a ledger after an interrupt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memkit.activations.saved.records import ON_DEVICE, Record, SavedResidency
from memkit.transfer.host_memory import Span

if TYPE_CHECKING:
    from memkit.activations.saved.ledger import Ledger


def mend(ledger: Ledger, others: Sequence[Span] = ()) -> None:
    """Repair what an interrupt left: see [Note: interrupts]. Makes the host wait for the device.

    Args:
        others: host memory of the ledger's arena that is held elsewhere.
    """
    ledger.arena.drain()
    ledger.device.synchronize()
    for record in tuple(ledger.records):
        for reference in record.handles:
            reference.is_counted = reference() is not None
        record.handles[:] = [reference for reference in record.handles if reference.is_counted]
        record.num_handles = len(record.handles)
        record.num_awaiting = sum(reference.is_awaiting for reference in record.handles)
        _put_down(ledger, record)
        if record.num_handles == 0:
            record.owner = record.maker = None
            ledger.close(record)
    live = [record for record in ledger.records if record.residency in ON_DEVICE]
    ledger.live_bytes = sum(record.num_bytes for record in live)
    ledger.moving_bytes = sum(record.num_bytes for record in live if record.counts is not None)
    ledger.backlog.clear()
    ledger.coming.clear()
    ledger.orphans.clear()
    ledger.arena.give_all(but_for=[*others, *(record.span for record in ledger.records if record.span is not None)])


def _put_down(ledger: Ledger, record: Record) -> None:
    """Let go of what the ledger itself holds on the device: nothing is under way. DEVICE and DROPPED stay, and all else
    -> HOST, or DROPPED if it is not there. A copy is whole if it was noted that it leaves."""
    residency = record.residency
    if residency in (SavedResidency.DEVICE, SavedResidency.DROPPED) or record.left is None:
        if record.span is not None:
            ledger.give_back_span(record.span, None)
            record.span = record.left = record.came = None
        if residency is not SavedResidency.DEVICE:
            ledger.enter(record, SavedResidency.DROPPED)
    else:
        ledger.enter(record, SavedResidency.HOST)
    record.storage = record.fetched = None
    if record.residency is not SavedResidency.DEVICE:
        ledger.let_go(record)
