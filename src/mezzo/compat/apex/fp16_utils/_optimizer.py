"""`apex.fp16_utils.FP16_Optimizer`: master weights and a loss scale for 16-bit parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from mezzo._dtypes import HALF_DTYPES
from mezzo.compat.apex.amp._amp_state import master_params
from mezzo.compat.apex.amp._scale_loss import LossScaler
from mezzo.optim.bind_optimizer import bind_half_parameters
from mezzo.scaling.gradients import isolated_gradients, parameters
from mezzo.scaling.scale_state import LARGEST

_DYNAMIC_DEFAULTS = {"init_scale": 2.0**32, "scale_factor": 2.0, "scale_window": 1000}


class FP16_Optimizer:
    """Wrap an optimizer of 16-bit parameters: float32 masters, static or dynamic loss scale.

    >>> model = torch.nn.Linear(2, 1).half()
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = FP16_Optimizer(sgd, static_loss_scale=128.0, verbose=False)
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
        if not isinstance(init_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"FP16_Optimizer takes an optimizer, got {type(init_optimizer).__name__}. Pass one"
                " of torch.optim, made with the float16 model's parameters."
            )
        self.optimizer = init_optimizer
        self.dynamic_loss_scale = dynamic_loss_scale
        self.verbose = verbose
        self.overflow = False
        """Whether this iteration has a non-finite gradient, so that the step will be skipped."""
        options: dict[str, Any] = _DYNAMIC_DEFAULTS | (dynamic_loss_args or {})
        scale = "dynamic" if dynamic_loss_scale else float(static_loss_scale)
        self.loss_scaler = LossScaler(scale, **options, min_loss_scale=1.0, max_loss_scale=LARGEST)
        self._scaled = False
        """Whether the gradients are still scaled, until `update_master_grads`."""
        self._check_and_print_parameters()
        self._masters = bind_half_parameters(init_optimizer)

    def _check_and_print_parameters(self) -> None:
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
        """Print if `verbose` is set."""
        if self.verbose:
            print(message)  # noqa: T201 - Apex prints it

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_grads_to_None)
        self._scaled = False

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward on the scaled loss and, unless `update_master_grads=False`, unscale."""
        scaled = self.loss_scaler.scale(loss)
        if not update_master_grads:
            if not self._scaled:
                self.loss_scaler.scale_gradients(self.optimizer)
            self._scaled = True
            scaled.backward(retain_graph=retain_graph)
            return
        with isolated_gradients([] if self._scaled else [self.optimizer]):
            scaled.backward(retain_graph=retain_graph)
            self._scaled = True
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients and check that they are finite. This synchronizes."""
        if self._scaled:
            flags = self.loss_scaler.unscale(self.optimizer)
            self.overflow = self.overflow or any(bool(flag) for flag in flags)
            self._scaled = False

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> torch.Tensor | int:
        """Clip the unscaled gradients; return their norm before, or -1 if they are non-finite."""
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(master_params(self.optimizer), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the unscaled gradients of each group, or None if they are non-finite."""
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
        """Step the masters unless a gradient is non-finite, and update the scale.

        A closure must call this optimizer's `backward`. Allowed with a static scale only.
        """
        if closure is not None and self.dynamic_loss_scale:
            raise TypeError(
                "step(closure) is not supported with dynamic loss scaling, which checks gradients"
                " before the step. Call backward(loss), then step()."
            )
        loss = None if closure is None else closure()
        self.update_master_grads()
        overflow, self.overflow = self.overflow, False
        # Read on overflow only: reading the scale synchronizes.
        scale_before = self.loss_scale if overflow else None
        self.loss_scaler.update_scale([torch.tensor(float(overflow))])
        if overflow:
            self.maybe_print(
                f"OVERFLOW! Skipping step. Attempted loss scale: {scale_before}, reducing to"
                f" {self.loss_scale}"
            )
            return loss
        value = self.optimizer.step()
        return value if closure is None else loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, the masters and the loss scale. This synchronizes."""
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
        """Load a `state_dict`, the masters bit for bit. The model may be loaded before or after."""
        scale = state_dict["loss_scaler"]
        self.loss_scaler.load(scale["loss_scale"], scale["unskipped"])
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        half = [parameter for parameter in parameters(self.optimizer) if parameter in self._masters]
        masters = [master for group in state_dict["fp32_from_fp16"] for master in group]
        for parameter, master in zip(half, masters, strict=True):
            self._masters.write(parameter, master.to(parameter.device))

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("FP16_Optimizer cannot be pickled. Save its state_dict() instead.")

    def __setstate__(self, _state: dict[str, Any]) -> NoReturn:
        raise RuntimeError(
            "FP16_Optimizer cannot be unpickled. Create one and call its load_state_dict()."
        )

    @property
    def fp32_from_fp16_groups(self) -> list[list[torch.Tensor]]:
        """Copies of the masters of each group."""
        return [
            [self._masters.read(p) for p in group["params"] if p in self._masters]
            for group in self.optimizer.param_groups
        ]

    @property
    def loss_scale(self) -> float:
        """The loss scale; settable. Reading it synchronizes."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.load(scale, self.loss_scaler._unskipped)

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups
