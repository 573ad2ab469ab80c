"""Run a program of plain torch before, during and after one that uses mezzo.

Prints where the results of the plain program differ.
"""

from __future__ import annotations

import json
import sys
import threading
import types
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from support.process import plain_program


def torch_functions() -> dict[str, Any]:
    """Return all functions, classes and methods of torch by name."""
    found = {}
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "torch"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type):
                found |= {
                    f"{module.__name__}.{name}.{inner}": one
                    for inner, one in list(vars(value).items())
                    if callable(one)
                }
    return found


def is_from_mezzo(value: Any) -> bool:
    """Return whether mezzo defines a function; dynamo replaces some of torch's functions too."""
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == "mezzo"
    # By the folder of the package: the environment with torch may be below another mezzo folder.
    made_in = getattr(getattr(value, "__code__", None), "co_filename", "")
    return Path(made_in).is_relative_to(Path(sys.modules["mezzo"].__file__).parent)


def differences(before: list[str], after: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of results that differ."""
    return [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]


def main() -> None:
    """Print the differences as JSON."""
    warnings.simplefilter("ignore")
    # torch imports these lazily, and mezzo changes something in each.
    for name in (
        "torch.export._trace",
        "torch._dynamo",
        "torch._functorch._aot_autograd.autograd_cache",
    ):
        import_module(name)
    before = torch_functions()
    plain = plain_program.warned_results()
    compiled = plain_program.compiled_results()
    unwarned = plain_program.results()

    # Imported here, since the effects of importing mezzo are tested too.
    from support.process import mezzo_program

    mezzo_program.use(compiler=True)
    done, rounds = threading.Event(), []

    def use_mezzo() -> None:
        while not done.is_set():
            mezzo_program.use(compiler=False)
            rounds.append(1)

    thread = threading.Thread(target=use_mezzo)
    thread.start()
    beside = [plain_program.results() for _ in range(2)]
    done.set()
    thread.join()

    after, changed = torch_functions(), {}
    for name, value in before.items():
        if after.get(name) is not value and is_from_mezzo(after.get(name)):
            changed.setdefault(id(after[name]), []).append(name)
    found = {
        "rounds": len(rounds),
        "beside": [pair for one in beside for pair in differences(unwarned, one)],
        "after": differences(plain, plain_program.warned_results()),
        "compiled after": differences(compiled, plain_program.compiled_results()),
        "changed": list(changed.values()),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
