"""`mxnet.mod.BucketingModule`: networks by bucket, such as one for each length of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

Network = Callable[..., Any]


class BucketingModule:
    """Networks that a function makes, one for each bucket. `sym_gen(key)` gives a module, or a tuple that starts with one, as in MXNet.

    >>> from torch import nn, ones
    >>> net = nn.Linear(2, 1)
    >>> module = BucketingModule(lambda key: net, default_bucket_key=8)
    >>> module.forward(ones(8, 2)).shape
    torch.Size([8, 1])
    """

    def __init__(self, sym_gen: Callable[[Any], Any], default_bucket_key: Hashable = None, **_: Any) -> None:
        self._sym_gen, self.default_bucket_key = sym_gen, default_bucket_key
        self.buckets: dict[Hashable, Network] = {}
        """The networks that were made so far."""
        self._chosen = default_bucket_key
        self._change: Callable[[Any], Network] = lambda network: network

    def switch_bucket(self, bucket_key: Hashable, *_: Any) -> None:
        """Go on with another bucket."""
        if bucket_key not in self.buckets:
            made = self._sym_gen(bucket_key)
            self.buckets[bucket_key] = self._change(made[0] if isinstance(made, tuple) else made)
        self._chosen = bucket_key

    def forward(self, *inputs: Any, bucket_key: Hashable = None) -> Any:
        """Run the network of a bucket, or of the one that is chosen."""
        self.switch_bucket(self._chosen if bucket_key is None else bucket_key)
        return self.buckets[self._chosen](*inputs)

    __call__ = forward

    def mapped(self, change: Callable[[Any], Network]) -> BucketingModule:
        """The same buckets with every network changed, those that are still to be made too."""
        made = BucketingModule(self._sym_gen, self.default_bucket_key)
        made._change, made._chosen = change, self._chosen
        made.buckets = {key: change(network) for key, network in self.buckets.items()}
        return made
