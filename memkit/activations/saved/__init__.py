"""What every context does with saved tensors: entries, forwards, records, and the ledger of their bytes."""
