"""Reports of observed runs: an HTML page, a terminal summary, and TensorBoard."""
