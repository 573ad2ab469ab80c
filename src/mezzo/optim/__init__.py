"""Optimizers over 16-bit parameters: master weights and the fused optimizer step."""
