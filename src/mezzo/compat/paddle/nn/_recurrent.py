"""Recurrent layers of `paddle.nn`: torch's, with Paddle's arguments; batches come first."""

from __future__ import annotations

from math import sqrt
from typing import Any

from torch import nn

from mezzo.compat.paddle.nn._layer import Layer
from mezzo.compat.paddle.nn.initializer import Uniform


class _RecurrentArguments:
    """Arguments and initial values of Paddle's recurrent layers, in front of torch's class."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        direction: str = "forward",
        time_major: bool = False,
        dropout: float = 0.0,
        weight_ih_attr: Any = None,
        weight_hh_attr: Any = None,
        bias_ih_attr: Any = None,
        bias_hh_attr: Any = None,
        name: str | None = None,
    ) -> None:
        if direction not in ("forward", "bidirect", "bidirectional"):
            raise ValueError(
                "direction should be forward or bidirect (or bidirectional), received direction ="
                f" {direction}"
            )
        super().__init__(  # type: ignore[call-arg]
            input_size,
            hidden_size,
            num_layers,
            batch_first=not time_major,
            dropout=dropout,
            bidirectional=direction != "forward",
        )
        attributes = {
            "weight_ih": weight_ih_attr,
            "weight_hh": weight_hh_attr,
            "bias_ih": bias_ih_attr,
            "bias_hh": bias_hh_attr,
        }
        bound = Uniform(-1.0 / sqrt(hidden_size), 1.0 / sqrt(hidden_size))
        for key, parameter in list(self.named_parameters()):  # type: ignore[attr-defined]
            kind = key[: key.index("_l")]
            created = self.create_parameter(  # type: ignore[attr-defined]
                parameter.shape,
                attributes[kind],
                is_bias=kind.startswith("bias"),
                default_initializer=bound,
            )
            if created is None:
                raise ValueError(f"{kind}_attr=False is not supported. Use torch.nn.LSTM and GRU.")
            setattr(self, key, created)

    def forward(self, inputs: Any, initial_states: Any = None, sequence_length: Any = None) -> Any:
        """Return the outputs and the last states."""
        if sequence_length is not None:
            raise ValueError(
                "sequence_length= is not supported. Pack the inputs with"
                " torch.nn.utils.rnn.pack_padded_sequence."
            )
        return super().forward(inputs, initial_states)  # type: ignore[misc]


class LSTM(_RecurrentArguments, nn.LSTM, Layer):
    """`paddle.nn.LSTM`: returns the outputs and the last hidden and cell states."""


class GRU(_RecurrentArguments, nn.GRU, Layer):
    """`paddle.nn.GRU`: returns the outputs and the last states."""
