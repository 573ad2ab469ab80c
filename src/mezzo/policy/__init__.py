"""What should happen: policies, the ops they speak of and the lists of other systems, as pure data and pure functions."""
