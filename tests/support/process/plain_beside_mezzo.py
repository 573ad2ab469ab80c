"""Run a program of plain torch before, beside and after one that uses mezzo, and print where its answers differ."""

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


def torchs_own() -> dict[str, Any]:
    """Every function and class of torch's by its name, with the methods of the classes."""
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


def is_ours(value: Any) -> bool:
    """Whether it was made by mezzo; dynamo replaces some of torch's functions too."""
    if isinstance(value, type):
        return value.__module__.partition(".")[0] == "mezzo"
    # By the folder of the package: the environment with torch may lie below one of the same name.
    made_in = getattr(getattr(value, "__code__", None), "co_filename", "")
    return Path(made_in).is_relative_to(Path(sys.modules["mezzo"].__file__).parent)


def differing(these: list[str], those: list[str]) -> list[tuple[str, str]]:
    """The answers that are not the same."""
    return [pair for pair in zip(these, those, strict=True) if pair[0] != pair[1]]


def main() -> None:
    """Print what differs as JSON."""
    warnings.simplefilter("ignore")
    # torch loads these late, and mezzo changes something in each.
    for name in (
        "torch.export._trace",
        "torch._dynamo",
        "torch._functorch._aot_autograd.autograd_cache",
    ):
        import_module(name)
    before = torchs_own()
    plain = plain_program.warned_answers()
    compiled = plain_program.compiled_answers()
    unwarned = plain_program.answers()

    # Only now, since importing mezzo is a part of what is watched.
    from support.process import mezzo_program

    mezzo_program.use(compiler=True)
    done, rounds = threading.Event(), []

    def others() -> None:
        while not done.is_set():
            mezzo_program.use(compiler=False)
            rounds.append(1)

    thread = threading.Thread(target=others)
    thread.start()
    beside = [plain_program.answers() for _ in range(2)]
    done.set()
    thread.join()

    after, changed = torchs_own(), {}
    for name, value in before.items():
        if after.get(name) is not value and is_ours(after.get(name)):
            changed.setdefault(id(after[name]), []).append(name)
    found = {
        "rounds": len(rounds),
        "beside": [pair for one in beside for pair in differing(unwarned, one)],
        "after": differing(plain, plain_program.warned_answers()),
        "compiled after": differing(compiled, plain_program.compiled_answers()),
        "changed": list(changed.values()),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
