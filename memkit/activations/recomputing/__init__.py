"""Record ops, drop saved tensors, and make them again: the recording stage."""
