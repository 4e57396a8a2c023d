"""Changes what is done with a saved record when the user marks it later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memkit.activations.saved.records import Record, SavedResidency
from memkit.plan import Action

if TYPE_CHECKING:
    from memkit.activations.offloading.window import OffloadWindow


def change(window: OffloadWindow, record: Record, storage: torch.UntypedStorage, action: Action) -> None:
    """Apply another action to a record, whose bytes are also in a storage of the user's. The caller holds the window's lock."""
    ledger, forward = window.ledger, record.owner
    ledger.sweep()
    if action is Action.RECOMPUTE:
        ledger.drop(record)
        return
    if record.residency is SavedResidency.DROPPED or (action is Action.KEEP and record.residency is SavedResidency.HOST):
        ledger.restore(record, storage)
    if forward is None:
        return
    is_waiting = any(waiting is record for waiting, _ in forward.unwritten)
    if action is Action.KEEP and (is_waiting or record.left is not None):  # it was to leave
        forward.unwritten = [waiting for waiting in forward.unwritten if waiting[0] is not record]
        forward.share.stays_after_all(record.num_bytes)
        if record.residency is SavedResidency.LEAVING:
            ledger.stay(record)
    elif action is Action.OFFLOAD and record.left is None and not is_waiting:
        forward.share.stays_after_all(-record.num_bytes)
        window.leave(forward, record, storage)
        window.make_room(forward)
