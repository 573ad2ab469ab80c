"""Optimizers over 16-bit parameters: where the exact weights live, and the pass that updates them."""
