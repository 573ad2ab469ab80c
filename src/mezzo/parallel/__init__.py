"""Training with several processes: wrappers of torch.distributed, and agreement of ranks."""
