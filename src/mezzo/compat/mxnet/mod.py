"""`mxnet.mod`: `Module` for inference, and `BucketingModule` with one network per bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.compat.mxnet._block import Block, LoadedBlock
from mezzo.compat.mxnet.io import DataBatch

Network = Callable[..., Any]
Params = dict[str, torch.Tensor]


class Module:
    """`mxnet.mod.Module` for inference with a converted network or a torch module.

    Differs from MXNet: no training. Use `gluon.Trainer` or `mezzo.TrainStep`.

    >>> from torch import ones
    >>> module = Module(nn.Linear(2, 1), data_names=["data"])
    >>> module.bind(data_shapes=[("data", (4, 2))])
    >>> module.forward(DataBatch(data=[ones(4, 2)]))
    >>> module.get_outputs()[0].shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        symbol: Block | LoadedBlock | nn.Module,
        data_names: Any = ("data",),
        label_names: Any = ("softmax_label",),
        **_: Any,
    ) -> None:
        self.symbol = symbol
        self.data_names = list(data_names)
        self.label_names = list(label_names or ())
        self.binded = False
        self._arg_params: Params = {}
        self._aux_params: Params = {}
        self._outputs: list[torch.Tensor] = []

    def bind(
        self, data_shapes: Any, label_shapes: Any = None, for_training: bool = False, **_: Any
    ) -> None:
        """Check that each data name has a shape. Nothing is allocated."""
        if len(data_shapes) != len(self.data_names):
            raise ValueError(
                f"data_shapes has {len(data_shapes)} entries for {len(self.data_names)} data_names"
                f" {self.data_names}. Pass one shape for each name."
            )
        self.binded = True

    def set_params(
        self, arg_params: Params, aux_params: Params, allow_missing: bool = False, **_: Any
    ) -> None:
        """Load parameters and buffers; a converted network accepts only its own."""
        params = {**arg_params, **aux_params}
        if isinstance(self.symbol, nn.Module):
            self.symbol.load_state_dict(params, strict=not allow_missing)
        else:
            _check_same_params(self.symbol.params, params)
        self._arg_params, self._aux_params = dict(arg_params), dict(aux_params)

    def get_params(self) -> tuple[Params, Params]:
        """Return the parameters and buffers passed to `set_params`."""
        return self._arg_params, self._aux_params

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run the network; read the result with `get_outputs`."""
        if not self.binded:
            raise AssertionError(
                "The module is not bound. Call bind(data_shapes=[('data', (1, 3, 224, 224))])"
                " first."
            )
        with torch.no_grad():
            result = self.symbol(*data_batch.data)
        self._outputs = list(result) if isinstance(result, list | tuple) else [result]

    def get_outputs(self, merge_multi_context: bool = True) -> list[torch.Tensor]:
        """Return the outputs of the last `forward`."""
        return self._outputs

    def save_checkpoint(
        self,
        prefix: str,
        epoch: int,
        save_optimizer_states: bool = False,
        remove_amp_cast: bool = False,
    ) -> str:
        """Save the converted network; return the file name."""
        if not isinstance(self.symbol, Block):
            raise UnsupportedError(
                f"save_checkpoint needs a converted network, got {type(self.symbol).__name__}."
                " Convert it first with amp.convert_model(...), or torch.save its state_dict()."
            )
        return self.symbol.save_checkpoint(prefix, epoch, remove_amp_cast)


def _check_same_params(stored: Params, params: Params) -> None:
    different = sorted(
        name
        for name, value in params.items()
        if name not in stored or not torch.equal(stored[name].float(), value.float())
    )
    if different:
        raise UnsupportedError(
            "set_params got other values than the network was converted with:"
            f" {', '.join(different)}. Pass what convert_model returned, or convert again with"
            " these parameters."
        )


class BucketingModule:
    """`mxnet.mod.BucketingModule`: one network per bucket, such as per sequence length.

    `sym_gen(key)` returns the network of a bucket, or a tuple that starts with it, as in MXNet.

    >>> from torch import nn, ones
    >>> net = nn.Linear(2, 1)
    >>> module = BucketingModule(lambda key: net, default_bucket_key=8)
    >>> module.forward(ones(8, 2)).shape
    torch.Size([8, 1])
    """

    def __init__(
        self, sym_gen: Callable[[Any], Any], default_bucket_key: Hashable = None, **_: Any
    ) -> None:
        self._sym_gen, self.default_bucket_key = sym_gen, default_bucket_key
        self.buckets: dict[Hashable, Network] = {}
        """The networks created so far."""
        self._current_key = default_bucket_key
        self._transform: Callable[[Any], Network] = lambda network: network

    def switch_bucket(self, bucket_key: Hashable, *_: Any) -> None:
        """Select a bucket; create its network on first use."""
        if bucket_key not in self.buckets:
            generated = self._sym_gen(bucket_key)
            network = generated[0] if isinstance(generated, tuple) else generated
            self.buckets[bucket_key] = self._transform(network)
        self._current_key = bucket_key

    def forward(self, *inputs: Any, bucket_key: Hashable = None) -> Any:
        """Run the network of `bucket_key`, by default of the current bucket."""
        self.switch_bucket(self._current_key if bucket_key is None else bucket_key)
        return self.buckets[self._current_key](*inputs)

    __call__ = forward

    def map_networks(self, transform: Callable[[Any], Network]) -> BucketingModule:
        """Return a module with every network transformed, including those created later."""
        module = BucketingModule(self._sym_gen, self.default_bucket_key)
        module._transform, module._current_key = transform, self._current_key
        module.buckets = {key: transform(network) for key, network in self.buckets.items()}
        return module
