"""`paddle.static`: programs that are recorded first and run later, by `mezzo.train_step`."""

from mezzo.compat._missing import module_getattr
from mezzo.compat.paddle._places import CPUPlace, CUDAPlace
from mezzo.compat.paddle._substitutions import SUBSTITUTIONS
from mezzo.compat.paddle.static import amp
from mezzo.compat.paddle.static._executor import Executor, Scope, global_scope
from mezzo.compat.paddle.static._input_spec import InputSpec
from mezzo.compat.paddle.static._program import (
    Program,
    Variable,
    data,
    default_main_program,
    default_startup_program,
    program_guard,
)

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "Executor",
    "InputSpec",
    "Program",
    "Scope",
    "Variable",
    "amp",
    "data",
    "default_main_program",
    "default_startup_program",
    "global_scope",
    "program_guard",
]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
