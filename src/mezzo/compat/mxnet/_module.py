"""`mxnet.mod.Module`: inference with a symbol or a torch network, by MXNet's calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mezzo._errors import UnsupportedError, nearest
from mezzo.compat.mxnet._block import Block, LoadedBlock
from mezzo.compat.mxnet._context import Context, cpu, one_device
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet.io import DataBatch, DataDesc, parse_shapes
from mezzo.compat.mxnet.model import load_checkpoint, save_checkpoint
from mezzo.compat.mxnet.symbol import Symbol, SymbolModel

Params = dict[str, Any]
"""Arrays by name; for a torch network what was passed."""

_TRAINING = ("backward", "fit", "init_optimizer", "update", "update_metric", "score")
_log = logging.getLogger()


class Module:
    """`mxnet.mod.Module` for inference with a symbol, a converted network or a torch module.

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
        symbol: Symbol | Block | LoadedBlock | nn.Module,
        data_names: str | Sequence[str] | None = ("data",),
        label_names: str | Sequence[str] | None = ("softmax_label",),
        logger: Any = None,
        context: Any = None,
        **_: Any,
    ) -> None:
        if not isinstance(symbol, Symbol | LoadedBlock) and not callable(symbol):
            raise TypeError(
                f"Module needs a Symbol or a torch network, got {type(symbol).__name__}. Load one"
                " with mx.sym.load or mx.model.load_checkpoint."
            )
        self.symbol = symbol
        self.data_names = _names(data_names)
        self.label_names = _names(label_names)
        self.binded = False
        self.params_initialized = False
        self._arg_params: Params = {}
        self._aux_params: Params = {}
        self._outputs: list[NDArray] = []
        self._data_shapes: list[DataDesc] = []
        self._label_shapes: list[DataDesc] | None = None
        self._device = _device_of(context, symbol)
        self._network: Any = symbol
        if isinstance(symbol, Symbol):
            _check_names(symbol, self.data_names)
            self._network = None
        elif isinstance(symbol, nn.Module) and self._device is not None:
            symbol.to(self._device)

    @staticmethod
    def load(prefix: str, epoch: int, **kwargs: Any) -> Module:
        """Return a module for a checkpoint, whose parameters `bind` sets."""
        symbol, arg_params, aux_params = load_checkpoint(prefix, epoch)
        module = Module(symbol, **kwargs)
        module._arg_params, module._aux_params = arg_params, aux_params
        module.params_initialized = True
        return module

    @property
    def data_shapes(self) -> list[DataDesc]:
        """The names and shapes of the data that the module is bound to."""
        return self._data_shapes

    @property
    def label_shapes(self) -> list[DataDesc] | None:
        """The names and shapes of the labels that the module is bound to."""
        return self._label_shapes

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs of a symbol."""
        return self.symbol.list_outputs() if isinstance(self.symbol, Symbol) else ["output"]

    def bind(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        for_training: bool = False,
        inputs_need_grad: bool = False,
        force_rebind: bool = False,
        **_: Any,
    ) -> None:
        """Set the names and shapes of the inputs. Batches of other shapes run too.

        `for_training` has no effect: a module runs inference.
        """
        if self.binded and not force_rebind:
            _log.warning("Already bound, ignoring bind()")
            return
        described = parse_shapes(data_shapes, self.data_names, "data")
        labels = None if not label_shapes else parse_shapes(label_shapes, self.label_names, "label")
        self._data_shapes, self._label_shapes = described, labels
        self.binded = True
        if self.params_initialized:
            self.set_params(self._arg_params, self._aux_params)

    def set_params(
        self,
        arg_params: Mapping[str, torch.Tensor],
        aux_params: Mapping[str, torch.Tensor],
        allow_missing: bool = False,
        force_init: bool = True,
        allow_extra: bool = False,
    ) -> None:
        """Set parameters and moving averages; all are checked before any is set.

        A torch network loads them; a converted one accepts only its own. A symbol needs `bind`
        first, and keeps the parameters in the context.
        """
        if self.params_initialized and not force_init:
            _log.warning(
                "Parameters already initialized and force_init=False. set_params call ignored."
            )
            return
        params = {**arg_params, **(aux_params or {})}
        if isinstance(self.symbol, Symbol):
            self._set_symbol_params(self.symbol, params, allow_missing, allow_extra)
        elif isinstance(self.symbol, Block | LoadedBlock):
            _check_same_params(self.symbol.params, params)
        else:
            plain = {name: as_tensor(value) for name, value in params.items()}
            self.symbol.load_state_dict(plain, strict=not allow_missing)
        if isinstance(self.symbol, Symbol):
            params = {name: as_ndarray(value) for name, value in params.items()}
        self._arg_params = {name: params[name] for name in arg_params}
        self._aux_params = {name: params[name] for name in aux_params or {}}
        self.params_initialized = True

    def init_params(
        self,
        initializer: Any = None,
        arg_params: Mapping[str, torch.Tensor] | None = None,
        aux_params: Mapping[str, torch.Tensor] | None = None,
        allow_missing: bool = False,
        force_init: bool = False,
        allow_extra: bool = False,
    ) -> None:
        """Set the parameters that are passed, unless there are some and `force_init` is False.

        Differs from MXNet: nothing is initialized at random, since there is no training.
        """
        if arg_params is None:
            raise UnsupportedError(
                "init_params needs arg_params: a module runs inference here, and does not"
                " initialize parameters at random. Pass what load_checkpoint returned."
            )
        self.set_params(arg_params, aux_params or {}, allow_missing, force_init, allow_extra)

    def get_params(self) -> tuple[Params, Params]:
        """Return the parameters and moving averages."""
        return self._arg_params, self._aux_params

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run the network; read the result with `get_outputs`."""
        if not self.binded:
            raise AssertionError(
                "The module is not bound. Call bind(data_shapes=[('data', (1, 3, 224, 224))])"
                " first."
            )
        if self._network is None:
            raise AssertionError(
                "The module has no parameters. Call set_params(arg_params, aux_params) first."
            )
        if not hasattr(data_batch, "data"):
            raise TypeError(
                f"forward got {type(data_batch).__name__}, expected a DataBatch. Pass"
                " mx.io.DataBatch(data=[array])."
            )
        batch = data_batch.data
        data = list(batch) if isinstance(batch, list | tuple) else [batch]
        if len(data) != len(self._data_shapes):
            raise ValueError(
                f"The batch has {len(data)} arrays of data for"
                f" {[shape.name for shape in self._data_shapes]}. Pass one for each name."
            )
        inputs = [self._place(value) for value in data]
        with torch.no_grad():
            if isinstance(self._network, SymbolModel):
                names = [shape.name for shape in self._data_shapes]
                result = self._network.run(dict(zip(names, inputs, strict=True)))
            else:
                result = self._network(*inputs)
        outputs = result if isinstance(result, list | tuple) else [result]
        self._outputs = [as_ndarray(value) for value in outputs]

    def get_outputs(self, merge_multi_context: bool = True) -> list[NDArray]:
        """Return the outputs of the last `forward`."""
        return self._outputs

    def predict(self, eval_data: Any, num_batch: int | None = None) -> NDArray | list[NDArray]:
        """Run an array, or the batches of an iterable, and return the joined outputs."""
        batches: Iterable[Any]
        batches = [DataBatch([eval_data])] if isinstance(eval_data, torch.Tensor) else eval_data
        outputs: list[list[torch.Tensor]] = []
        for number, batch in enumerate(batches):
            if number == num_batch:
                break
            self.forward(batch)
            # The last batch of an iterator may be filled up.
            outputs.append([output[: len(output) - (batch.pad or 0)] for output in self._outputs])
        joined = [as_ndarray(torch.cat(parts)) for parts in zip(*outputs, strict=True)]
        return joined[0] if len(joined) == 1 else joined

    def save_checkpoint(
        self,
        prefix: str,
        epoch: int,
        save_optimizer_states: bool = False,
        remove_amp_cast: bool | None = None,
    ) -> None:
        """Save the symbol and its parameters, or the converted network; see `save_checkpoint`."""
        if not isinstance(self.symbol, Symbol | Block):
            raise UnsupportedError(
                f"save_checkpoint needs a converted network, got {type(self.symbol).__name__}."
                " Convert it first with amp.convert_model(...), or torch.save its state_dict()."
            )
        save_checkpoint(
            prefix, epoch, self.symbol, self._arg_params, self._aux_params, remove_amp_cast
        )

    def __getattr__(self, name: str) -> Any:
        if name in _TRAINING:
            raise AttributeError(
                f"Module.{name} is not supported: a module runs inference here. Train with"
                " gluon.Trainer or mezzo.TrainStep."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _place(self, value: Any) -> torch.Tensor:
        try:
            tensor = torch.as_tensor(as_tensor(value))
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"Got {value!r}, expected an array.") from None
        return tensor if self._device is None else tensor.to(self._device)

    def _set_symbol_params(
        self, symbol: Symbol, params: Mapping[str, Any], allow_missing: bool, allow_extra: bool
    ) -> None:
        if not self.binded:
            raise AssertionError("call bind before initializing the parameters")
        inputs = {*self.data_names, *self.label_names, *symbol.label_names()}
        needed = [name for name in symbol.list_inputs() if name not in inputs]
        missing = [name for name in needed if name not in params]
        if missing and not allow_missing:
            raise RuntimeError(
                f"{', '.join(missing)} is not presented. Pass all parameters, or"
                " allow_missing=True."
            )
        extra = sorted(params.keys() - set(needed))
        if extra and not allow_extra:
            raise ValueError(
                f"Find name {', '.join(extra)} that is not in the arguments. Pass allow_extra=True"
                " to ignore it."
            )
        used = {name: self._place(params[name]) for name in needed if name in params}
        self._network = SymbolModel(symbol.graph, used)


def _device_of(context: Any, symbol: Any) -> torch.device | None:
    """Return the device of a context; None to leave a torch network where it is."""
    if context is None:
        return cpu().device if isinstance(symbol, Symbol) else None
    return one_device(Context(context) if isinstance(context, str) else context)


def _names(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _check_names(symbol: Symbol, data_names: Sequence[str]) -> None:
    arguments = symbol.list_arguments()
    for name in data_names:
        if name not in arguments:
            raise ValueError(
                f"You created Module with Module(..., data_names={list(data_names)}) but input with"
                f" name {name!r} is not found in symbol.list_arguments()."
                f"{nearest(name, arguments)}"
            )


def _check_same_params(stored: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    different = sorted(
        name
        for name, value in params.items()
        if name not in stored
        or not torch.equal(as_tensor(stored[name]).float(), as_tensor(value).float())
    )
    if different:
        raise UnsupportedError(
            "set_params got other values than the network was converted with:"
            f" {', '.join(different)}. Pass what convert_model returned, or convert again with"
            " these parameters."
        )
