"""Eager execution under a policy."""

from mezzo.eager.hooks import install

install()
