"""Which tests `make quick`, `make test` and `make test-all` run. A pytest plugin of `conftest.py`.

- `make quick` leaves out tests that are marked `slow` or listed in `tests/slow.txt`. It does not
  import files that have no others.
- `make test` leaves out tests that are marked `exhaustive`. Of a test that is marked `thinned(n)`
  it runs one of n cases.
- `make test-all` sets MEZZO_EXHAUSTIVE=1 and runs all tests that need no GPU.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest

EXHAUSTIVE = bool(os.environ.get("MEZZO_EXHAUSTIVE"))
SLOW = Path(__file__).parents[1] / "slow.txt"
"""Folder, name and seconds of test functions that take long, all their cases together."""
SLOW_SECONDS = 0.05
SLOW_TO_IMPORT = ("tests/gpu/", "tests/integrations/", "src/mezzo/integrations/")
"""Folders that `make quick` leaves out: importing Lightning alone takes as long as many tests."""
_ROOT = Path(__file__).parents[2]
_TEST = re.compile(r"^(?: {4})?def (test_\w+)", re.MULTILINE)
_MARKED_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-slow", action="store_true", help="write tests/slow.txt from this run"
    )


def pytest_configure(config: pytest.Config) -> None:
    # With xdist the reports of all workers arrive at the process that started them.
    if config.option.record_slow and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(), "record-slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file without a test to run: imports take a third of the time of `make quick`."""
    leaves_out_slow = "not slow" in config.option.markexpr
    return (leaves_out_slow and _is_slow_file(collection_path)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path,
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Search no doctests in files of tests, which have none."""
    collectors = yield
    if not file_path.name.startswith("test_"):
        return collectors
    return [collector for collector in collectors if type(collector) is pytest.Module]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add markers before pytest selects tests by them, and drop what `make test` leaves out."""
    slow = _slow_functions()
    for item in items:
        if _function(item.nodeid) in slow or item.nodeid.startswith(SLOW_TO_IMPORT):
            item.add_marker("slow")
    if EXHAUSTIVE:
        return
    dropped = {*_thinned_out(items), *(item for item in items if _is_exhaustive(item))}
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def _is_exhaustive(item: pytest.Item) -> bool:
    return item.get_closest_marker("exhaustive") is not None


def _thinned_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    cases = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("thinned"):
            cases[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (_, keep_one_of), group in cases.items():
        yield from (item for place, item in enumerate(group) if not is_kept(place, keep_one_of))


def is_kept(place: int, keep_one_of: int) -> bool:
    """Return whether a thinned test runs its case at `place`.

    The kept cases form a Latin pattern: where the fastest parameter has `keep_one_of` values, every
    value of the other parameters is kept once, with each value of the fastest one in rotation.

    >>> [is_kept(place, 2) for place in range(8)]
    [True, False, False, True, True, False, False, True]
    """
    return (place + place // keep_one_of) % keep_one_of == 0


def _function(nodeid: str) -> tuple[str, str]:
    """Return folder and name of a test function; moving it within a folder does not change them."""
    path, _, name = nodeid.partition("[")[0].partition("::")
    return "/".join(path.split("/")[:2]), name


def _is_slow_file(path: Path) -> bool:
    """Return whether all tests of a file are slow, without importing it."""
    if path.suffix != ".py" or not path.is_relative_to(_ROOT):
        return False
    name = path.relative_to(_ROOT).as_posix()
    if name.startswith(SLOW_TO_IMPORT):
        return True
    if not path.name.startswith("test_"):
        return False
    source = path.read_text()
    tests = {_function(f"{name}::{test}") for test in _TEST.findall(source)}
    return bool(_MARKED_SLOW.search(source)) or (bool(tests) and tests <= _slow_functions())


@cache
def _slow_functions() -> set[tuple[str, str]]:
    lines = SLOW.read_text().splitlines() if SLOW.exists() else []
    return {(folder, name) for folder, name, _ in map(str.split, lines)}


class _Recorder:
    """Sums up the time of each test function, and writes those that are slow."""

    def __init__(self) -> None:
        self._seconds: Counter[tuple[str, str]] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_function(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        slow = sorted(item for item in self._seconds.items() if item[1] >= SLOW_SECONDS)
        SLOW.write_text("".join(f"{' '.join(key)} {seconds:.1f}\n" for key, seconds in slow))
