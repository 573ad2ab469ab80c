"""`mxnet.mod`: a network that is bound and fed batches, and networks by bucket, such as one for each length of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError
from mezzo.compat.mxnet._block import Block, Loaded
from mezzo.compat.mxnet.io import DataBatch

Network = Callable[..., Any]
Params = dict[str, torch.Tensor]


class Module:
    """A network that inference feeds batches to: what `convert_model` gives, what `load_checkpoint` gives, or a torch module.

    >>> from torch import ones
    >>> module = Module(nn.Linear(2, 1), data_names=["data"])
    >>> module.bind(data_shapes=[("data", (4, 2))])
    >>> module.forward(DataBatch(data=[ones(4, 2)]))
    >>> module.get_outputs()[0].shape
    torch.Size([4, 1])
    """

    def __init__(
        self,
        symbol: Block | Loaded | nn.Module,
        data_names: Any = ("data",),
        label_names: Any = ("softmax_label",),
        **_: Any,
    ) -> None:
        self.symbol, self.data_names, self.label_names = (
            symbol,
            list(data_names),
            list(label_names or ()),
        )
        self.binded = False
        self._arg_params: Params = {}
        self._aux_params: Params = {}
        self._outputs: list[torch.Tensor] = []

    # MXNet's call shape.
    def bind(
        self, data_shapes: Any, label_shapes: Any = None, for_training: bool = False, **_: Any
    ) -> None:
        """Say what will be fed. Nothing is laid out ahead here; training is `mezzo.TrainStep`'s work, or a `gluon.Trainer`'s."""
        if len(data_shapes) != len(self.data_names):
            raise ValueError(
                f"data_shapes has {len(data_shapes)} entries for {len(self.data_names)} data_names"
                f" {self.data_names}. Give each its shape."
            )
        self.binded = True

    # MXNet's call shape.
    def set_params(
        self, arg_params: Params, aux_params: Params, allow_missing: bool = False, **_: Any
    ) -> None:
        """Take over parameters and buffers. A converted network was made with its own, and takes no others."""
        given = {**arg_params, **aux_params}
        if isinstance(self.symbol, nn.Module):
            self.symbol.load_state_dict(given, strict=not allow_missing)
        else:
            _refuse_others(self.symbol.params, given)
        self._arg_params, self._aux_params = dict(arg_params), dict(aux_params)

    def get_params(self) -> tuple[Params, Params]:
        """What `set_params` was given."""
        return self._arg_params, self._aux_params

    # MXNet's call shape.
    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run the network; `get_outputs` gives what came out."""
        if not self.binded:
            raise AssertionError(
                "The module is not bound. Call bind(data_shapes=[('data', (1, 3, 224, 224))])"
                " first."
            )
        with torch.no_grad():
            made = self.symbol(*data_batch.data)
        self._outputs = list(made) if isinstance(made, list | tuple) else [made]

    # MXNet's call shape.
    def get_outputs(self, merge_multi_context: bool = True) -> list[torch.Tensor]:
        """What the last `forward` gave."""
        return self._outputs

    def save_checkpoint(
        self,
        prefix: str,
        epoch: int,
        save_optimizer_states: bool = False,
        remove_amp_cast: bool = False,
    ) -> str:
        """Write the converted network to a file, with its casts; the file's name comes back."""
        if not isinstance(self.symbol, Block):
            raise UnsupportedError(
                f"{type(self.symbol).__name__} is no converted network. Convert it first:"
                " amp.convert_model(...); or torch.save its state_dict()."
            )
        return self.symbol.save_checkpoint(prefix, epoch, remove_amp_cast)


def _refuse_others(own: Params, given: Params) -> None:
    strange = sorted(
        name
        for name, value in given.items()
        if name not in own or not torch.equal(own[name].float(), value.float())
    )
    if strange:
        raise UnsupportedError(
            f"These are not what the network was converted with: {', '.join(strange)}. Pass what"
            " convert_model gave, or convert anew with these parameters."
        )


class BucketingModule:
    """Networks that a function makes, one for each bucket. `sym_gen(key)` gives a module, or a tuple that starts with one, as in MXNet.

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
