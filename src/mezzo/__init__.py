"""mezzo: automatic mixed precision for PyTorch."""
