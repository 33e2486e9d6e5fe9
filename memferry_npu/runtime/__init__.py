"""Hooks that replay a plan around the user's model."""
