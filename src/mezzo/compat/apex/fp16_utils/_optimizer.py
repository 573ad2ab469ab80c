"""`FP16_Optimizer`: masters and a scale around an optimizer whose parameters are 16-bit already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.apex.amp._amp_state import master_params
from mezzo.compat.apex.amp._scale_loss import LossScaler
from mezzo.optim.attach import bind_half_parameters
from mezzo.scaling.gradients import isolated_gradients, parameters
from mezzo.scaling.scale_state import LARGEST

_DYNAMIC = {"init_scale": 2.0**32, "scale_factor": 2.0, "scale_window": 1000}


class FP16_Optimizer:  # noqa: N801 - Apex's spelling
    """Steps float32 masters of 16-bit parameters, with a static or a dynamic loss scale.

    >>> model = torch.nn.Linear(2, 1).half()
    >>> optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=128.0, verbose=False)
    >>> optimizer.backward(model(torch.ones(1, 2, dtype=torch.half)).sum())
    >>> optimizer.step()
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.optimizer, self.dynamic_loss_scale, self.verbose = (
            init_optimizer,
            dynamic_loss_scale,
            verbose,
        )
        self.overflow = False
        """Whether the gradients of this iteration are not finite: the step will be skipped."""
        words: dict[str, Any] = _DYNAMIC | (dynamic_loss_args or {})
        scale = "dynamic" if dynamic_loss_scale else float(static_loss_scale)
        self.loss_scaler = LossScaler(scale, **words, min_loss_scale=1.0, max_loss_scale=LARGEST)
        self._scaled = False
        """Whether gradients wait for `update_master_grads`."""
        self._tell()
        self._masters = bind_half_parameters(init_optimizer)

    def _tell(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {number}:")
            for parameter in group["params"]:
                if parameter.dtype not in (*HALF_DTYPES, torch.float32):
                    raise TypeError(
                        "Wrapped parameters must be float16, bfloat16 or float32, got"
                        f" {parameter.type()} of shape {tuple(parameter.shape)}."
                    )
                self.maybe_print(
                    f"FP16_Optimizer received {parameter.type()} with {parameter.size()}"
                )

    def maybe_print(self, message: str) -> None:
        """Print if the constructor was told to be verbose."""
        if self.verbose:
            print(message)  # noqa: T201 - as Apex tells it

    # -- an iteration ------------------------------------------------------------------------------

    # Apex's call shape.
    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._scaled = False

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward of the scaled loss. Gradients are unscaled at once, unless `update_master_grads=False` leaves that for later."""
        scaled = self.loss_scaler.scale(loss)
        if not update_master_grads:
            if not self._scaled:
                self.loss_scaler.scale_up(self.optimizer)
            self._scaled = True
            scaled.backward(retain_graph=retain_graph)
            return
        with isolated_gradients([] if self._scaled else [self.optimizer]):
            scaled.backward(retain_graph=retain_graph)
            self._scaled = True
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients and look whether they are finite."""
        if self._scaled:
            flags = self.loss_scaler.unscale(self.optimizer)
            self.overflow = self.overflow or any(bool(flag) for flag in flags)
            self._scaled = False

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> torch.Tensor | int:
        """Clip the unscaled gradients together; their norm before, or -1 where they are not finite."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(master_params(self.optimizer), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """The unscaled gradients, group by group; None where they are not finite."""
        if self.overflow:
            self.maybe_print(
                "Warning:  the gradients are not finite, so there are none to inspect."
            )
            return None
        return [
            [parameter.grad for parameter in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters unless the gradients are not finite, and adapt the scale. A closure calls this optimizer's `backward`."""
        if closure is not None and self.dynamic_loss_scale:
            raise TypeError(
                "step(closure) does not go with dynamic loss scaling, which must see the gradients"
                " first. Call backward(loss), then step()."
            )
        loss = None if closure is None else closure()
        self.update_master_grads()
        bad, self.overflow = self.overflow, False
        # Read only now, for that waits for the device.
        before = self.loss_scale if bad else None
        self.loss_scaler.update_scale([torch.tensor(float(bad))])
        if bad:
            self.maybe_print(
                f"OVERFLOW! Skipping step. Attempted loss scale: {before}, reducing to"
                f" {self.loss_scale}"
            )
            return loss
        value = self.optimizer.step()
        return value if closure is None else loss

    # -- saving ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, its masters, and the scale."""
        return {
            "loss_scaler": {
                "loss_scale": self.loss_scale,
                "unskipped": self.loss_scaler._unskipped,
            },
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": self.fp32_from_fp16_groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, the masters to the bit; the model is loaded before or after."""
        scale = state_dict["loss_scaler"]
        self.loss_scaler._loss_scale, self.loss_scaler._unskipped = (
            scale["loss_scale"],
            scale["unskipped"],
        )
        self.dynamic_loss_scale, self.overflow = (
            state_dict["dynamic_loss_scale"],
            state_dict["overflow"],
        )
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        masters = (one for group in state_dict["fp32_from_fp16"] for one in group)
        for parameter, value in zip(
            (one for one in parameters(self.optimizer) if one in self._masters),
            masters,
            strict=True,
        ):
            self._masters.write(parameter, value.to(parameter.device))

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("An FP16_Optimizer is not pickled. Save its state_dict() instead.")

    def __setstate__(self, _state: dict[str, Any]) -> NoReturn:
        raise RuntimeError(
            "An FP16_Optimizer is not unpickled. Make one, and call its load_state_dict()."
        )

    # -- what is the optimizer's or the scaler's ---------------------------------------------------

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """Copies of the masters, group by group."""
        return [
            [self._masters.read(one) for one in group["params"] if one in self._masters]
            for group in self.optimizer.param_groups
        ]

    @property
    def loss_scale(self) -> float:
        """The scale, which may be set."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler._loss_scale = scale

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups
