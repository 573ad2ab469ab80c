"""`paddle.static.amp`: decorate an optimizer of a static program."""

from __future__ import annotations

import warnings
from inspect import signature
from typing import Any

import torch

from mezzo.compat.paddle._places import device_of
from mezzo.compat.paddle.amp._auto_cast import Names, custom_lists
from mezzo.compat.paddle.amp._grad_scaler import ScalerParameters
from mezzo.compat.paddle.static._program import Program, fp16_guard
from mezzo.compat.paddle.static._training import GRAY, Precision, ProgramTrainer, close
from mezzo.policy.presets import paddle
from mezzo.policy.types import Level, Rule


class AutoMixedPrecisionLists:
    """Op lists in Paddle's names, on top of the default ones. Variables cannot be listed: `custom_black_varnames` names what torch does not name.

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
        white, black = set(custom_white_list or ()), set(custom_black_list or ())
        if both := sorted(white & black):
            raise ValueError(
                "The given custom_white_list overlaps custom_black_list with <"
                f" {', '.join(both)} >!"
            )
        if custom_black_varnames:
            raise ValueError(
                f"custom_black_varnames={custom_black_varnames!r}: variables have no names of their"
                " own here. List the op that reads them, or keep it out of fp16_guard."
            )
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"The dtype of the lists should be 'float16' or 'bfloat16', got {dtype!r}."
            )
        self.amp_dtype = dtype
        self.half, self.full = custom_lists(white, black)
        """The same in mezzo's words."""
        self.white_list = (_listed(Rule.HALF) - black) | white
        self.black_list = (_listed(Rule.FULL) - white) | black
        self.gray_list = set(GRAY.split()) - self.white_list - self.black_list


def _listed(rule: Rule) -> set[str]:
    """The names under a rule by default, those with a counterpart here."""
    entries = paddle.lists(Level.O1, torch.float16).entries
    return {
        name
        for name, ours in paddle.NAMES.known.items()
        if all(one in entries and entries[one].rule is rule for one in ours)
    }


CustomOpLists = AutoMixedPrecisionLists
"""The name by which the guide calls the lists."""


__all__ = [
    "AutoMixedPrecisionLists",
    "CustomOpLists",
    "OptimizerWithMixedPrecision",
    "decorate",
    "fp16_guard",
]

_OLD = {"use_pure_fp16", "use_fp16_guard", "use_bf16"}
"""Words of the older signature alone."""
_NEW = {"level", "dtype", "master_weight", "master_grad", "use_amp_guard", "use_promote"}
"""Words of the newer one alone."""


def decorate(
    optimizer: torch.optim.Optimizer,
    amp_lists: AutoMixedPrecisionLists | None = None,
    *args: Any,
    **kwargs: Any,
) -> OptimizerWithMixedPrecision:
    """Let an optimizer train static programs in mixed precision; its `minimize` closes a program.

    Two signatures, as in Paddle 3, told apart by their words:

    - `level="O1"`, `dtype`, `master_weight`, `master_grad`, `init_loss_scaling=2**16`, `incr_every_n_steps=2000`, `decr_every_n_nan_or_inf=1`, `incr_ratio=2`,
      `decr_ratio=0.5`, `use_dynamic_loss_scaling`, `use_amp_guard`, `use_promote`: masters are kept at O2 unless `master_weight=False`.
    - `init_loss_scaling=2**15`, `incr_every_n_steps=1000`, `decr_every_n_nan_or_inf=2`, `incr_ratio=2`, `decr_ratio=0.8`, `use_dynamic_loss_scaling=True`,
      `use_pure_fp16`, `use_fp16_guard`, `use_bf16`: masters are kept where the optimizer was made with `multi_precision=True`.

    The scale stays at 1 or above. bfloat16 is not scaled.

    >>> from mezzo.compat import paddle
    >>> model, program = torch.nn.Linear(2, 1), paddle.static.Program()
    >>> with paddle.static.program_guard(program):
    ...     loss = model(paddle.static.data("x", [-1, 2])).square().mean()
    ...     optimizer = decorate(paddle.optimizer.SGD(learning_rate=0.1, parameters=model.parameters()), init_loss_scaling=128.0, use_dynamic_loss_scaling=True)
    ...     _ = optimizer.minimize(loss)
    >>> losses = paddle.static.Executor(paddle.CPUPlace()).run(program, feed={"x": [[1.0, 2.0]]}, fetch_list=[loss])
    >>> losses[0].dtype, optimizer.get_loss_scaling()
    (dtype('float32'), 128.0)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer should be an optimizer, got {type(optimizer).__name__}.")
    positional_scale = bool(args) and isinstance(args[0], int | float)
    old, new = _OLD & kwargs.keys(), _NEW & kwargs.keys()
    if (old or positional_scale) and new:
        raise TypeError(
            "decorate() has two signatures, and these words are of both:"
            f" {', '.join(sorted(old)) or 'a scale as third argument'} with"
            f" {', '.join(sorted(new))}."
        )
    read = _older if old or positional_scale else _newer
    given = (optimizer, amp_lists or AutoMixedPrecisionLists(), *args)
    try:
        signature(read).bind(*given, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"decorate() {error}. After the lists this signature takes:"
            f" {', '.join(list(signature(read).parameters)[2:])}."
        ) from None
    return OptimizerWithMixedPrecision(optimizer, read(*given, **kwargs))


def _older(
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
    ratios = (incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
    return Precision(
        level="O2" if use_pure_fp16 else "O1",
        dtype="bfloat16" if use_bf16 else "float16",
        half=lists.half,
        full=lists.full,
        guarded=use_pure_fp16 and (use_fp16_guard is None or use_fp16_guard),
        masters=bool(getattr(optimizer, "_multi_precision", False)),
        scaling=_scaling(
            "bfloat16" if use_bf16 else "float16",
            init_loss_scaling,
            ratios,
            use_dynamic_loss_scaling,
        ),
    )


def _newer(
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
    ratios = (incr_ratio, decr_ratio, incr_every_n_steps, decr_every_n_nan_or_inf)
    return Precision(
        level=level,
        dtype=dtype,
        half=lists.half,
        full=lists.full,
        guarded=use_amp_guard and level == "O2",
        promote=use_promote,
        masters=master_weight is not False,
        master_grad=master_grad,
        scaling=_scaling(dtype, init_loss_scaling, ratios, use_dynamic_loss_scaling),
    )


def _scaling(
    dtype: str, scale: float, ratios: tuple[float, float, int, int], dynamic: bool | None
) -> ScalerParameters | None:
    if dtype == "bfloat16":
        if dynamic:
            warnings.warn(
                "Dynamic loss scaling for bfloat16 amp training is disabled: it has the range of"
                " float32.",
                UserWarning,
                stacklevel=4,
            )
        return None
    incr_ratio, decr_ratio, incr_every, decr_every = ratios
    return ScalerParameters(
        float(scale),
        incr_ratio,
        decr_ratio,
        incr_every,
        decr_every,
        dynamic is None or bool(dynamic),
        min_scale=1.0,
    )


class OptimizerWithMixedPrecision:
    """An optimizer for static programs: `minimize` closes a program, `amp_init` makes its parameters 16-bit."""

    def __init__(self, optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        self._optimizer, self._precision = optimizer, precision
        self._closing: ProgramTrainer | None = None

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[Any, Any]:
        """Close the program of a loss: every run trains from then on."""
        if isinstance(loss, torch.Tensor) and not hasattr(loss, "program"):
            raise TypeError(
                "minimize() takes the loss of a static program, got a tensor with values. Eagerly"
                " use amp.auto_cast and amp.GradScaler."
            )
        self._closing = close(loss, self._optimizer, self._precision)
        return [], []

    def amp_init(
        self,
        place: Any,
        scope: Any = None,
        test_program: Program | None = None,
        # A test runs in the precision of training.
        use_fp16_test: bool = False,
        # Masters start from the float32 values.
        rewrite_master_weight: bool = False,
    ) -> None:
        """Bring the parameters to a place, and make them 16-bit at O2. The first run does both too, where this is not called."""
        closing = self._closed()
        if test_program is not None:
            test_program.closing = closing
        closing.move(device_of(place))
        closing.prepare()

    def get_loss_scaling(self) -> float:
        """The scale now; 1 where losses are not scaled."""
        scaler = self._closed().scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def _closed(self) -> ProgramTrainer:
        if self._closing is None:
            raise AssertionError("Please call the minimize method first.")
        return self._closing

    def __getattr__(self, name: str) -> Any:
        """Everything else is the optimizer's."""
        return getattr(self.__dict__["_optimizer"], name)
