"""`mezzo compare`: train one workload in several precisions, and compare time, memory and loss."""
