"""Eager execution under a policy."""

from mezzo.autocasting.torch_hooks import install

install()
