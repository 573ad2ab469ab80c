"""The state that all accelerators of Accelerate share."""

import sys


def reset_accelerate_state():
    """Reset the shared state, if Accelerate was imported: a doctest may have created it."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
