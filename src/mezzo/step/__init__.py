"""The whole training step as one object: forward, backward, check, clip, update, recast, new scale, captured where a device can replay it."""
