"""`paddle.amp.debugging`: statistics of ops, and checks of their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import wraps
from typing import Any, ClassVar

import torch

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle._tensor import Tensor, to_tensor
from mezzo.compat.paddle.amp._accuracy_table import write_comparison
from mezzo.compat.paddle.amp._op_names import name_of_aten, op_names
from mezzo.compat.paddle.amp._tensor_stats import TensorStats
from mezzo.observing.check_numerics import NumericsCheck
from mezzo.observing.checking_mode import CheckedOp, OpFilter, call_with_gradients
from mezzo.observing.nonfinite import NonFiniteOp, TensorRange
from mezzo.observing.op_places import PlaceTracker
from mezzo.observing.op_stats import OpStats

__all__ = [
    "DebugMode",
    "TensorCheckerConfig",
    "check_layer_numerics",
    "check_numerics",
    "collect_operator_stats",
    "compare_accuracy",
    "disable_operator_stats_collection",
    "disable_tensor_checker",
    "enable_operator_stats_collection",
    "enable_tensor_checker",
]


class DebugMode(Enum):
    """What is logged of the results of ops, and whether a bad one raises."""

    CHECK_NAN_INF_AND_ABORT = 0
    CHECK_NAN_INF = 1
    CHECK_ALL_FOR_OVERFLOW = 2
    CHECK_ALL = 3


# -- op statistics ---------------------------------------------------------------------------------

_COLUMNS = {"float16": 0, "bfloat16": 1, "float32": 2}
_OTHER = 3
_stats: OpStats | None = None


def enable_operator_stats_collection() -> None:
    """Begin to count the calls of ops by dtype, from zero."""
    global _stats
    if _stats is not None:
        _stats.stop()
    _stats = OpStats()
    _stats.start()


def disable_operator_stats_collection() -> None:
    """Stop counting, and print the table of the counts."""
    global _stats
    if _stats is None:
        return
    _stats.stop()
    stats, _stats = _stats, None
    _print_table(stats)


@contextmanager
def collect_operator_stats() -> Iterator[None]:
    """Count the calls of ops in a block by dtype, and print the table of the counts.

    >>> layer = torch.nn.Linear(2, 2)
    >>> with collect_operator_stats():
    ...     _ = layer(torch.ones(1, 2)).exp().exp()  # doctest: +ELLIPSIS
    <... op list ...>
    <... Op Name ... | -- FP16 Calls --- | -- BF16 Calls --- | --- FP32 Calls--- | ...
      exp                                     |  0                |  0                |  2 ...
      linear_v2                               |  0                |  0                |  1 ...
      ones                                    |  0                |  0                |  1 ...
    <... op count: 3 ...>
    <BLANKLINE>
    """
    global _stats
    enable_operator_stats_collection()
    try:
        yield
    except BaseException:
        if _stats is not None:
            _stats.stop()
            _stats = None
        raise
    disable_operator_stats_collection()


def _print_table(stats: OpStats) -> None:
    counts: dict[str, list[int]] = {}
    for row in stats.rows:
        calls = counts.setdefault(name_of_aten(row.op), [0, 0, 0, 0])
        calls[_COLUMNS.get(row.dtype, _OTHER)] += row.calls
    titles = (" FP16 Calls ", " BF16 Calls ", " FP32 Calls", " Other Calls ")
    lines = [
        f"<{' op list ':-^120}>",
        " | ".join([f"<{' Op Name ':-^40}", *(f"{title:-^17}" for title in titles)]) + ">",
        *(
            f"  {name:<40}|  " + "|  ".join(f"{number:<17}" for number in calls)
            for name, calls in sorted(counts.items())
        ),
        f"<{f' op count: {len(counts)} ':-^120}>\n",
    ]
    print("\n".join(lines))  # noqa: T201 - as Paddle does


# -- tensor checker --------------------------------------------------------------------------------


class TensorCheckerConfig:
    """What `enable_tensor_checker` checks.

    Random generators are not seeded, unlike Paddle's. `debug_step=[a, b]` checks the calls of
    `enable_tensor_checker` from number a, counted from 0, to the one before b.
    """

    current_step_id: ClassVar[int] = 0

    def __init__(
        self,
        enable: bool,
        debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
        output_dir: str | os.PathLike[str] | None = None,
        checked_op_list: list[str] | tuple[str, ...] | None = None,
        skipped_op_list: list[str] | tuple[str, ...] | None = None,
        debug_step: list[int] | tuple[int, int] | None = None,
        stack_height_limit: int = 1,
    ) -> None:
        self.enable, self.debug_mode, self.output_dir = enable, debug_mode, output_dir
        self.checked_op_list, self.skipped_op_list = checked_op_list, skipped_op_list
        self.debug_step, self.stack_height_limit = debug_step, stack_height_limit
        self.seed = self.initial_seed = torch.initial_seed()
        for name in ("debug_step", "checked_op_list", "skipped_op_list"):
            if not isinstance(getattr(self, name), list | tuple | None):
                raise ValueError(f"{name} must be list or tuple")
        if not isinstance(debug_mode, DebugMode):
            known = ", ".join(f"DebugMode.{mode.name}" for mode in DebugMode)
            raise ValueError(f"debug_mode={debug_mode!r} is no DebugMode. Choose one of: {known}.")
        self.start_step: int | None = None
        self.end_step: int | None = None
        if debug_step is not None:
            start, end = debug_step if len(debug_step) == 2 else (0, 0)
            if end <= start:
                raise AssertionError(
                    f"debug_step={debug_step!r} is no pair of steps, the first below the second."
                    " Pass [0, 3] for the first three."
                )
            self.start_step, self.end_step = max(start, 0), end

    def update_and_check_step_id(self) -> bool:
        """Count a step, and return whether it is checked."""
        if not self.enable:
            return False
        if self.start_step is None or self.end_step is None:
            return True
        current = TensorCheckerConfig.current_step_id
        if current >= self.end_step:
            return False
        TensorCheckerConfig.current_step_id += 1
        return current >= self.start_step

    def start_check_nan_inf(self) -> None:
        """Check ops from now on."""
        global _checker
        if not isinstance(self.stack_height_limit, int):
            raise ValueError("stack_height_limit must be int")
        self.stop_check_nan_inf()
        # Assigned after the start: an error leaves nothing that runs.
        checker = NumericsCheck(PlaceTracker(), _Logger(self), OpFilter())
        checker.start()
        _checker = checker

    def stop_check_nan_inf(self) -> None:
        """Check no ops from now on."""
        disable_tensor_checker()


_checker: NumericsCheck | None = None


def enable_tensor_checker(checker_config: TensorCheckerConfig) -> None:
    """Check the results of ops until `disable_tensor_checker`, if the configuration has this step.

    Call both outside of `auto_cast`, or both inside.
    """
    if checker_config.update_and_check_step_id():
        checker_config.start_check_nan_inf()
    else:
        checker_config.stop_check_nan_inf()


def disable_tensor_checker() -> None:
    """Check no ops from now on."""
    global _checker
    if _checker is not None:
        _checker.stop()
    _checker = None


class _Logger:
    """Logs the results of ops; of the ops of a gradient, only what they return together."""

    def __init__(self, config: TensorCheckerConfig) -> None:
        self._config = config
        self._node: Any = None

    def start_step(self, step: int) -> None:
        """Do nothing: steps are counted by `enable_tensor_checker`."""

    def ranges(self, tensors: list[torch.Tensor]) -> tuple[TensorRange, ...]:
        """Return nothing: logs have no ranges of inputs."""
        return ()

    def add(self, op: CheckedOp, ranges: tuple[TensorRange, ...]) -> None:
        """Log the outputs of an op."""
        names = op_names(op.name, backward=op.place.backward)
        if not self._is_logged(names):
            return
        if op.node is None:
            self._log(op.outputs, names[0])
        elif op.node is not self._node:
            self._node = op.node
            call_with_gradients(op.node, lambda gradients: self._log(gradients, names[0]))

    def findings(self) -> tuple[NonFiniteOp, ...]:
        """Return nothing: findings are logged."""
        return ()

    def _is_logged(self, names: list[str]) -> bool:
        checked, skipped = self._config.checked_op_list, self._config.skipped_op_list
        if checked and not set(names) & set(checked):
            return False
        return not (skipped and set(names) & set(skipped))

    def _log(self, tensors: list[torch.Tensor], name: str) -> None:
        for tensor in tensors:
            stats = TensorStats.of(tensor, name, "")
            stats.report(self._config.debug_mode.value, self._config.output_dir)


def check_numerics(
    tensor: torch.Tensor,
    op_type: str,
    var_name: str,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
) -> tuple[Tensor, Tensor]:
    """Return the numbers of NaN, infinite values and zeros, and the maximum, minimum and mean.

    >>> stats, values = check_numerics(to_tensor([1.0, 0.0, 3.0]), "pow", "res")
    >>> stats.tolist(), [round(value, 2) for value in values.tolist()]
    ([0, 0, 1], [3.0, 0.0, 1.33])
    """
    found = TensorStats.of(tensor, op_type, var_name)
    found.report(debug_mode.value)
    counts = to_tensor([found.nan, found.inf, found.zero], dtype="int64")
    return counts, to_tensor([found.max, found.min, found.mean], dtype="float32")


def check_layer_numerics(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the forward of a layer: its ops are checked, and a bad result raises."""

    @wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise RuntimeError("No elements found in args.")
        if not isinstance(args[0], torch.Tensor):
            raise RuntimeError("First input of this layer must be tensor.")
        logger = _Logger(TensorCheckerConfig(enable=True))
        with NumericsCheck(PlaceTracker(), logger, OpFilter()):
            return func(self, *args, **kwargs)

    return wrapper


def compare_accuracy(
    dump_path: str | os.PathLike[str],
    another_dump_path: str | os.PathLike[str],
    output_filename: str | os.PathLike[str],
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> None:
    """Compare the logs of a float32 run and a 16-bit run, in a file for spreadsheets.

    The logs are those of `TensorCheckerConfig(debug_mode=DebugMode.CHECK_ALL, output_dir=...)`.
    """
    if dump_all_tensors:
        raise AssertionError("It is currently not supported.")
    write_comparison(dump_path, another_dump_path, output_filename, loss_scale)


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
