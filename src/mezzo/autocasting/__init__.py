"""Autocast in eager and compiled code."""

from mezzo.autocasting.torch_hooks import install

install()
