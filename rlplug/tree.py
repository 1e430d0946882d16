"""Nested dicts of arrays or tensors."""
