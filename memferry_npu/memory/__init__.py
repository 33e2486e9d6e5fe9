"""Slabs, slots and shadow parameters: where every byte of the model's state lies."""
