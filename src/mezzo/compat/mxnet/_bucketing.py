"""`mxnet.mod.BucketingModule`: one network per bucket, such as per sequence length."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from mezzo.compat.mxnet._module import Module
from mezzo.compat.mxnet._ndarray import NDArray
from mezzo.compat.mxnet.io import DataBatch

Network = Callable[..., Any]
Params = Mapping[str, torch.Tensor]


class BucketingModule:
    """`mxnet.mod.BucketingModule`: one network per bucket, such as per sequence length.

    `sym_gen(key)` returns the symbol or network of a bucket, or a tuple that starts with it and
    ends with the names of the data and of the labels, as in MXNet. Calling it with arrays returns
    the result; `forward` of a `DataBatch` is read with `get_outputs`.

    >>> from torch import nn, ones
    >>> net = nn.Linear(2, 1)
    >>> module = BucketingModule(lambda key: net, default_bucket_key=8)
    >>> module.forward(ones(8, 2)).shape
    torch.Size([8, 1])
    >>> module.bind([("data", (8, 2))])
    >>> module.forward(DataBatch([ones(4, 2)], bucket_key=4))
    >>> module.get_outputs()[0].shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        sym_gen: Callable[[Any], Any],
        default_bucket_key: Hashable = None,
        logger: Any = None,
        context: Any = None,
        **_: Any,
    ) -> None:
        self._sym_gen, self.default_bucket_key = sym_gen, default_bucket_key
        self._context = context
        self.buckets: dict[Hashable, Any] = {}
        """The networks or symbols created so far."""
        self._names: dict[Hashable, tuple[Any, Any]] = {}
        self._modules: dict[Hashable, Module] = {}
        """The modules of the buckets that ran a `DataBatch`."""
        self._current_key = default_bucket_key
        self._transform: Callable[[Any], Any] = lambda network: network
        self._params: tuple[Params, Params, dict[str, bool]] | None = None
        self.binded = False

    @property
    def symbol(self) -> Any:
        """The symbol or network of the current bucket."""
        self.switch_bucket(self._current_key)
        return self.buckets[self._current_key]

    def bind(self, data_shapes: Any, label_shapes: Any = None, **_: Any) -> None:
        """Bind the default bucket; others are bound when a batch of theirs comes."""
        self.switch_bucket(self.default_bucket_key, data_shapes, label_shapes)
        self.binded = True

    def set_params(
        self,
        arg_params: Params,
        aux_params: Params,
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Set the parameters of all buckets, also of those created later."""
        if not self.binded:
            raise AssertionError("call bind before initializing the parameters")
        options = {"allow_missing": allow_missing, "allow_extra": allow_extra}
        for module in self._modules.values():
            module.set_params(arg_params, aux_params, force_init=force_init, **options)
        self._params = (arg_params, aux_params, options)

    init_params = set_params

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return the parameters and moving averages of the current bucket."""
        module = self._modules.get(self._current_key)
        return ({}, {}) if module is None else module.get_params()

    def get_outputs(self, merge_multi_context: bool = True) -> list[NDArray]:
        """Return the outputs of the last `forward` of a `DataBatch`."""
        module = self._modules.get(self._current_key)
        return [] if module is None else module.get_outputs()

    def switch_bucket(
        self, bucket_key: Hashable, data_shapes: Any = None, label_shapes: Any = None
    ) -> None:
        """Select a bucket; create its network on first use, and with shapes bind it."""
        if bucket_key not in self.buckets:
            generated = self._sym_gen(bucket_key)
            network, *names = generated if isinstance(generated, tuple) else (generated,)
            self.buckets[bucket_key] = self._transform(network)
            default = (("data",), ("softmax_label",))
            self._names[bucket_key] = (names[0], names[1]) if len(names) > 1 else default
        self._current_key = bucket_key
        if data_shapes is not None and bucket_key not in self._modules:
            data_names, label_names = self._names.get(bucket_key, (("data",), ()))
            module = Module(
                self.buckets[bucket_key], data_names, label_names, context=self._context
            )
            module.bind(data_shapes, label_shapes)
            if self._params is not None:
                arg_params, aux_params, options = self._params
                module.set_params(arg_params, aux_params, **options)
            self._modules[bucket_key] = module

    def forward(
        self, *inputs: Any, bucket_key: Hashable = None, is_train: bool | None = None
    ) -> Any:
        """Run a `DataBatch` in its bucket, or arrays, whose result is returned."""
        if len(inputs) == 1 and isinstance(inputs[0], DataBatch):
            self._forward_batch(inputs[0], bucket_key)
            return None
        self.switch_bucket(self._current_key if bucket_key is None else bucket_key)
        return self.buckets[self._current_key](*inputs)

    __call__ = forward

    def _forward_batch(self, batch: DataBatch, bucket_key: Hashable) -> None:
        if not self.binded:
            raise AssertionError(
                "The module is not bound. Call bind(data_shapes=[('data', (32, 10))]) first."
            )
        keys = (bucket_key, batch.bucket_key, self.default_bucket_key)
        key = next((key for key in keys if key is not None), None)
        self.switch_bucket(key)
        names = self._names.get(key, (("data",), ()))[0]
        shapes = batch.provide_data or [
            (name, tuple(array.shape)) for name, array in zip(names, batch.data, strict=False)
        ]
        self.switch_bucket(key, shapes)
        self._modules[key].forward(batch)

    def map_networks(self, transform: Callable[[Any], Any]) -> BucketingModule:
        """Return a module with every network transformed, including those created later."""
        module = BucketingModule(self._sym_gen, self.default_bucket_key, context=self._context)
        module._transform, module._current_key = transform, self._current_key
        module.buckets = {key: transform(network) for key, network in self.buckets.items()}
        module._names = dict(self._names)
        return module

    def copy_binding(self, other: BucketingModule, arg_params: Params, aux_params: Params) -> None:
        """Bind to the shapes of another module, with these parameters."""
        for key, module in other._modules.items():
            self.switch_bucket(key, module.data_shapes, module.label_shapes)
        self._current_key, self.binded = other._current_key, other.binded
        if self.binded:
            self.set_params(arg_params, aux_params)
