"""What the `auto_cast` around a call, or the precision of its static program, sets for an op."""

from __future__ import annotations

from mezzo.autocasting.arguments import policy_of
from mezzo.autocasting.dynamo import dynamo_constant
from mezzo.autocasting.regions import innermost_region
from mezzo.policy.types import Rule


@dynamo_constant
def adds_in_float32() -> bool:
    """Return whether `elementwise_add` is in the custom black list around this call.

    >>> from mezzo.compat import paddle
    >>> with paddle.amp.auto_cast(custom_black_list={"elementwise_add"}):
    ...     adds_in_float32()
    True
    """
    region = innermost_region()
    policy = None if region is None or not region.enabled else policy_of(region)
    return policy is not None and "add" in policy.ops_with_rule(Rule.FULL)
