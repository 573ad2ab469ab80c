"""`paddle.static.amp`: mixed precision for static programs."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.amp._auto_cast import Names, check_names, custom_lists
from mezzo.compat.paddle.amp._scaler_parameters import ScalerParameters
from mezzo.compat.paddle.static._program import Program, fp16_guard
from mezzo.compat.paddle.static._training import GRAY, Precision, ProgramTrainer, attach_trainer
from mezzo.policy.presets import paddle
from mezzo.policy.types import Level, Rule

__all__ = [
    "AutoMixedPrecisionLists",
    "CustomOpLists",
    "OptimizerWithMixedPrecision",
    "decorate",
    "fp16_guard",
]

_OLDER_ONLY = {"use_pure_fp16", "use_fp16_guard", "use_bf16"}
"""Arguments that only the older signature of `decorate` has."""
_NEWER_ONLY = {"level", "dtype", "master_weight", "master_grad", "use_amp_guard", "use_promote"}
"""Arguments that only the newer signature of `decorate` has."""


class AutoMixedPrecisionLists:
    """`paddle.static.amp.AutoMixedPrecisionLists`: the default op lists with custom changes.

    `custom_black_varnames` raises: torch's tensors have no names to select them by.

    >>> lists = AutoMixedPrecisionLists(custom_white_list=["elementwise_add"])
    >>> "elementwise_add" in lists.white_list, "softmax" in lists.black_list
    (True, True)
    """

    def __init__(
        self,
        custom_white_list: Names = None,
        custom_black_list: Names = None,
        custom_black_varnames: Names = None,
        dtype: str = "float16",
    ) -> None:
        white = set(check_names("custom_white_list", custom_white_list))
        black = set(check_names("custom_black_list", custom_black_list))
        if both := sorted(white & black):
            raise ValueError(
                "The given custom_white_list overlaps custom_black_list with <"
                f" {', '.join(both)} >!"
            )
        if custom_black_varnames:
            raise ValueError(
                f"custom_black_varnames={custom_black_varnames!r} is not supported: tensors have no"
                " names here. List the op that reads them, or call it outside of fp16_guard."
            )
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"The dtype of the lists should be 'float16' or 'bfloat16', got {dtype!r}."
            )
        self.amp_dtype = dtype
        self.half, self.full = custom_lists(white, black)
        """The custom lists in mezzo's op names."""
        self.white_list = (_default_names(Rule.HALF) - black) | white
        self.black_list = (_default_names(Rule.FULL) - white) | black
        self.gray_list = set(GRAY.split()) - self.white_list - self.black_list


CustomOpLists = AutoMixedPrecisionLists
"""The name of the lists in Paddle's guide."""


def _default_names(rule: Rule) -> set[str]:
    """Return Paddle's names of the ops under a rule by default, if torch has them."""
    entries = paddle.lists(Level.O1, torch.float16).entries
    return {
        name
        for name, ops in paddle.NAMES.known.items()
        if all(op in entries and entries[op].rule is rule for op in ops)
    }


def decorate(
    optimizer: torch.optim.Optimizer,
    amp_lists: AutoMixedPrecisionLists | None = None,
    *args: Any,
    **kwargs: Any,
) -> OptimizerWithMixedPrecision:
    """Return an optimizer whose `minimize` makes a static program train in mixed precision.

    Stands for `paddle.static.amp.decorate` and has its two signatures. Which one is meant follows
    from the arguments, as in Paddle 3:

    - newer: `level="O1"`, `dtype`, `master_weight`, `master_grad`, `init_loss_scaling=2**16`,
      `incr_every_n_steps=2000`, `decr_every_n_nan_or_inf=1`, `incr_ratio=2`, `decr_ratio=0.5`,
      `use_dynamic_loss_scaling`, `use_amp_guard`, `use_promote`. Master weights are kept at O2
      unless `master_weight=False`.
    - older: `init_loss_scaling=2**15`, `incr_every_n_steps=1000`, `decr_every_n_nan_or_inf=2`,
      `incr_ratio=2`, `decr_ratio=0.8`, `use_dynamic_loss_scaling=True`, `use_pure_fp16`,
      `use_fp16_guard`, `use_bf16`. Master weights are kept if the optimizer was constructed with
      `multi_precision=True`.

    The loss scale is at least 1. Losses are not scaled in bfloat16.

    >>> from mezzo.compat import paddle
    >>> model, program = torch.nn.Linear(2, 1), paddle.static.Program()
    >>> with paddle.static.program_guard(program):
    ...     loss = model(paddle.static.data("x", [-1, 2])).square().mean()
    ...     sgd = paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters())
    ...     optimizer = decorate(sgd, init_loss_scaling=128.0, use_dynamic_loss_scaling=True)
    ...     _ = optimizer.minimize(loss)
    >>> executor = paddle.static.Executor(paddle.CPUPlace())
    >>> losses = executor.run(program, feed={"x": [[1.0, 2.0]]}, fetch_list=[loss])
    >>> losses[0].dtype, optimizer.get_loss_scaling()
    (dtype('float32'), 128.0)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = (
            " It is decorated already."
            if isinstance(optimizer, OptimizerWithMixedPrecision)
            else ""
        )
        raise TypeError(f"optimizer should be an optimizer, got {type(optimizer).__name__}.{hint}")
    if amp_lists is not None and not isinstance(amp_lists, AutoMixedPrecisionLists):
        raise TypeError(
            f"amp_lists should be a CustomOpLists, got {type(amp_lists).__name__}. Pass"
            " static.amp.CustomOpLists(custom_white_list=[...])."
        )
    positional_scale = bool(args) and isinstance(args[0], int | float)
    older, newer = _OLDER_ONLY & kwargs.keys(), _NEWER_ONLY & kwargs.keys()
    if (older or positional_scale) and newer:
        raise TypeError(
            "decorate() has two signatures, and these arguments mix them:"
            f" {', '.join(sorted(older)) or 'a scale as third argument'} with"
            f" {', '.join(sorted(newer))}."
        )
    parse = _parse_older if older or positional_scale else _parse_newer
    positional = (optimizer, amp_lists or AutoMixedPrecisionLists(), *args)
    try:
        signature(parse).bind(*positional, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"decorate() {error}. After the lists this signature takes:"
            f" {', '.join(list(signature(parse).parameters)[2:])}."
        ) from None
    return OptimizerWithMixedPrecision(optimizer, parse(*positional, **kwargs))


class OptimizerWithMixedPrecision:
    """`paddle.static.amp.OptimizerWithMixedPrecision`: what `decorate` returns.

    `minimize` makes a program train; `amp_init` casts its parameters to 16 bits. Any other
    attribute is the wrapped optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        self._optimizer, self._precision = optimizer, precision
        self._trainer: ProgramTrainer | None = None

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[Any, Any]:
        """Make every run of the loss's program train."""
        if isinstance(loss, torch.Tensor) and not hasattr(loss, "program"):
            raise TypeError(
                "minimize() takes the loss of a static program, got a tensor with values. In eager"
                " mode use amp.auto_cast and amp.GradScaler."
            )
        self._trainer = attach_trainer(loss, self._optimizer, self._precision)
        return [], []

    def amp_init(
        self,
        place: Any,
        scope: Any = None,
        test_program: Program | None = None,
        use_fp16_test: bool = False,
        rewrite_master_weight: bool = False,
    ) -> None:
        """Move the parameters to a place, and cast them to 16 bits at O2.

        The first run does both if this was not called. `use_fp16_test` has no effect: a test
        program runs in the precision of training. Nor has `rewrite_master_weight`: master weights
        start from the float32 values.
        """
        trainer = self._require_trainer()
        if test_program is not None and not isinstance(test_program, Program):
            raise TypeError(
                f"test_program should be a Program, got {type(test_program).__name__}. Pass"
                " main_program.clone(for_test=True)."
            )
        if test_program is not None:
            test_program.train_with(trainer)
        trainer.move(device_of(place))
        trainer.prepare()

    def get_loss_scaling(self) -> float:
        """Return the current loss scale; 1 if losses are not scaled."""
        scaler = self._require_trainer().scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _require_trainer(self) -> ProgramTrainer:
        if self._trainer is None:
            raise AssertionError("Please call the minimize method first.")
        return self._trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


# -- the two signatures of decorate ----------------------------------------------------------------


def _parse_older(
    optimizer: Any,
    lists: AutoMixedPrecisionLists,
    init_loss_scaling: float = 2.0**15,
    incr_every_n_steps: int = 1000,
    decr_every_n_nan_or_inf: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    use_dynamic_loss_scaling: bool = True,
    use_pure_fp16: bool = False,
    use_fp16_guard: bool | None = None,
    use_bf16: bool = False,
) -> Precision:
    dtype = "bfloat16" if use_bf16 else "float16"
    return Precision(
        level="O2" if use_pure_fp16 else "O1",
        dtype=dtype,
        half=lists.half,
        full=lists.full,
        guarded=use_pure_fp16 and (use_fp16_guard is None or use_fp16_guard),
        masters=bool(getattr(optimizer, "_multi_precision", False)),
        scaling=_scaler_parameters(
            dtype,
            use_dynamic_loss_scaling,
            init_loss_scaling=init_loss_scaling,
            incr_ratio=incr_ratio,
            decr_ratio=decr_ratio,
            incr_every_n_steps=incr_every_n_steps,
            decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        ),
    )


def _parse_newer(
    optimizer: Any,
    lists: AutoMixedPrecisionLists,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,
    master_grad: bool = False,
    init_loss_scaling: float = 2.0**16,
    incr_every_n_steps: int = 2000,
    decr_every_n_nan_or_inf: int = 1,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.5,
    use_dynamic_loss_scaling: bool | None = None,
    use_amp_guard: bool = False,
    use_promote: bool = False,
) -> Precision:
    if level not in ("O0", "OD", "O1", "O2"):
        raise ValueError(f"level should be O0, OD, O1 or O2. It is {level!r}.")
    if dtype not in ("float16", "bfloat16"):
        raise ValueError(
            f"If enable AMP, dtype should be 'float16' or 'bfloat16'. It is {dtype!r}."
        )
    if level == "O0":
        return Precision()
    return Precision(
        level=level,
        dtype=dtype,
        half=lists.half,
        full=lists.full,
        guarded=use_amp_guard and level == "O2",
        promote=use_promote,
        masters=master_weight is not False,
        master_grad=master_grad,
        scaling=_scaler_parameters(
            dtype,
            use_dynamic_loss_scaling,
            init_loss_scaling=init_loss_scaling,
            incr_ratio=incr_ratio,
            decr_ratio=decr_ratio,
            incr_every_n_steps=incr_every_n_steps,
            decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
        ),
    )


def _scaler_parameters(dtype: str, dynamic: bool | None, **options: Any) -> ScalerParameters | None:
    """Return the parameters of loss scaling, or None for bfloat16."""
    if dtype == "bfloat16":
        if dynamic:
            # Level 4: decorate, the parser of its signature, and this function lie between.
            warnings.warn(
                "Dynamic loss scaling for bfloat16 amp training is disabled: it has the range of"
                " float32.",
                UserWarning,
                stacklevel=4,
            )
        return None
    dynamic = dynamic is None or bool(dynamic)
    return ScalerParameters(use_dynamic_loss_scaling=dynamic, min_scale=1.0, **options)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
