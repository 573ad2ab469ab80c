"""`gluon.Block` and `gluon.HybridBlock`: torch modules with gluon's methods."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mezzo._casting import map_tensors
from mezzo.compat.mxnet import initializer, nd
from mezzo.compat.mxnet._context import one_device
from mezzo.compat.mxnet._dtype import torch_dtype
from mezzo.compat.mxnet._ndarray import NDArray, as_ndarray, as_tensor
from mezzo.compat.mxnet._parameter import ParameterDict, named_parameters

__all__ = ["Block", "HybridBlock", "Layer"]


class Block(nn.Module):
    """`gluon.Block`: a torch module with gluon's methods. Subclasses define `forward`.

    A subclass is called with what was passed to it, arrays or tensors. Outside
    `autograd.record()`, dropout and batch normalization run for inference, as in MXNet.

    >>> from mezzo.compat.mxnet import gluon, nd
    >>> class Double(gluon.Block):
    ...     def forward(self, x):
    ...         return x * 2
    >>> Double()(nd.ones((1,))).asscalar()
    2.0
    """

    prefix = ""
    """The prefix passed to the constructor; names of parameters do not contain it."""

    def __init__(self, prefix: str | None = None, params: Any = None) -> None:
        super().__init__()
        self.prefix = prefix or ""

    @property
    def name(self) -> str:
        """The prefix without the underscore at its end."""
        return self.prefix.rstrip("_")

    @contextmanager
    def name_scope(self) -> Iterator[Self]:
        """Do nothing: parameters are named by their paths in the network."""
        yield self

    @property
    def params(self) -> ParameterDict:
        """The parameters of this block, without those of its children."""
        return ParameterDict(self, r"[^.]+$")

    def collect_params(self, select: str | None = None) -> ParameterDict:
        """Return the parameters and statistics by name, those that match a pattern."""
        return ParameterDict(self, select)

    def initialize(
        self,
        init: Any = None,
        ctx: Any = None,
        verbose: bool = False,
        force_reinit: bool = False,
    ) -> None:
        """Initialize layers that are not yet, by default with `Uniform(0.07)`, and move to `ctx`.

        Layers without `in_units` or `in_channels` are initialized at their first call. Differs from
        MXNet: a network that is not initialized has values already, of the default initializer.
        """
        weight_init = initializer.create(init)
        already = []
        for path, layer in self.named_modules():
            if isinstance(layer, Layer) and next(layer.parameters(recurse=False), None) is not None:
                if layer.is_initialized and not force_reinit:
                    already.append(path or type(layer).__name__)
                else:
                    layer.set_initializer(weight_init)
        self.to(one_device(ctx))
        if already:
            warnings.warn(
                f"Parameters of {len(already)} layers, such as {already[0]!r}, are already"
                " initialized, ignoring. Set force_reinit=True to re-initialize.",
                stacklevel=2,
            )

    def hybridize(self, active: bool = True, **kwargs: Any) -> None:
        """Do nothing but check: networks run eagerly. `torch.compile(net)` compiles one."""

    def cast(self, dtype: Any) -> None:
        """Cast parameters and statistics, for 16-bit training without AMP; see `mezzo.decorate`."""
        self.to(torch_dtype(dtype))

    def save_parameters(self, filename: str | os.PathLike[str], deduplicate: bool = False) -> None:
        """Write a `.params` file of MXNet, with the names of `collect_params`."""
        self.collect_params().save(filename)

    def load_parameters(
        self,
        filename: str | os.PathLike[str],
        ctx: Any = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
        cast_dtype: bool = False,
        dtype_source: str = "current",
    ) -> None:
        """Read a `.params` file of MXNet, and move to `ctx` if it is passed."""
        self.collect_params().load(filename, ctx, allow_missing, ignore_extra)
        self.mark_initialized()

    def load_dict(
        self,
        param_dict: Any,
        ctx: Any = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
    ) -> None:
        """Copy arrays by name into the parameters."""
        self.collect_params().load_dict(
            map_tensors(dict(param_dict), as_tensor), "the dict", allow_missing, ignore_extra
        )
        self.mark_initialized()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state of torch; a later `initialize` keeps it."""
        result = super().load_state_dict(*args, **kwargs)
        self.mark_initialized()
        return result

    def mark_initialized(self) -> None:
        """Make a later `initialize` keep the values."""
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.keep_values()

    def register_child(self, block: nn.Module, name: str | None = None) -> None:
        """Add a child, by default under its number."""
        self.add_module(name or str(len(self._modules)), block)

    def summary(self, *inputs: Any) -> None:
        """Print the network and its number of parameters."""
        with torch.no_grad():
            self(*inputs)
        count = sum(value.tensor.numel() for value in named_parameters(self).values())
        print(f"{self}\nParameters: {count}")  # noqa: T201 - its purpose


class HybridBlock(Block):
    """`gluon.HybridBlock`: subclasses define `forward(x)`, or `hybrid_forward(F, x)`.

    `F` is `mxnet.nd`.

    >>> from mezzo.compat.mxnet import gluon, nd
    >>> class Relu(gluon.HybridBlock):
    ...     def hybrid_forward(self, F, x):
    ...         return F.relu(x)
    >>> Relu()(nd.array([-1, 2])).asnumpy().tolist()
    [0.0, 2.0]
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `hybrid_forward` with arrays; tensors in, tensors out."""
        if torch.compiler.is_compiling():
            # Compiled and exported code has ordinary tensors only.
            return self.hybrid_forward(nd, *args, **kwargs)
        arrays, keywords = map_tensors((args, kwargs), as_ndarray)
        result = self.hybrid_forward(nd, *arrays, **keywords)
        if arrays is args and keywords is kwargs:
            return result
        return map_tensors(result, as_tensor)

    def hybrid_forward(self, F: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; subclasses override this or `forward`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no forward(x) and no hybrid_forward(F, x). Define one."
        )


class Layer(HybridBlock):
    """A block of torch ops: its `forward` gets tensors, also when it is called with arrays.

    The attributes have defaults on the class, because torch's layers call `reset_parameters` before
    a subclass could set them.
    """

    is_initialized = False
    """Whether `initialize` keeps the values: they were set by it, or loaded."""
    weight_init: initializer.Initializer = initializer.Uniform()
    own_inits: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    """Initializers of single parameters by attribute, such as `weight_initializer` of a layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; arrays in, arrays out."""
        if not kwargs and not any(isinstance(value, NDArray) for value in args):
            # The layers inside a layer are called with tensors: no time is lost there.
            return super().__call__(*args)
        plain_args, plain_kwargs = map_tensors((args, kwargs), as_tensor)
        result = super().__call__(*plain_args, **plain_kwargs)
        if plain_args is args and plain_kwargs is kwargs:
            return result
        return map_tensors(result, as_ndarray)

    def keep_values(self) -> None:
        """Make a later `initialize` keep the values."""
        self.is_initialized = True

    def set_initializer(self, weight_init: initializer.Initializer) -> None:
        """Initialize with this initializer, now or when the shapes are known."""
        self.weight_init, self.is_initialized = weight_init, True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize parameters and statistics whose shapes are known."""
        for name, parameter in named_parameters(self).items():
            if "." not in name and not is_lazy(parameter.tensor):
                own = self.own_inits.get(name)
                init = self.weight_init if own is None else initializer.create(own)
                init(name, parameter.tensor)
