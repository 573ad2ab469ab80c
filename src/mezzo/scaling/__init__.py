"""Loss scaling: `GradScaler`, the loss scale, and schedulers that follow skipped steps."""
