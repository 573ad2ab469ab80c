"""`megengine.hub`: networks of a local repository with a `hubconf.py`. Nothing is downloaded.

A repository is looked up where MegEngine keeps it, in `hub` below `$MGE_HOME`,
`$XDG_CACHE_HOME/megengine` or `~/.cache/megengine`; or its folder is passed. `hubconf.py` is
executed, and `import megengine` in it gives this dialect.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from torch import nn

from mezzo._errors import UnsupportedError, nearest
from mezzo.compat._missing import module_getattr
from mezzo.compat.megengine._substitutions import SUBSTITUTIONS
from mezzo.compat.megengine.device import default_device
from mezzo.compat.megengine.serialization import load as load_file

__all__ = [
    "help",
    "import_module",
    "list",
    "load",
    "load_serialized_obj_from_url",
    "pretrained",
]

_DIALECT = __name__.rpartition(".")[0]
_HUBCONF = "hubconf.py"
_REPOSITORY = re.compile(r"([^/:]+)/([^/:]+)(?::([^:]+))?")


def load(
    repo_info: str | os.PathLike[str],
    entry: str,
    *args: Any,
    git_host: str = "github.com",
    use_cache: bool = True,
    commit: str | None = None,
    protocol: str = "HTTPS",
    **kwargs: Any,
) -> Any:
    """Call an entry of a local repository's `hubconf.py`, and return its network.

    `repo_info` is "owner/name[:branch]", or a folder. Networks are moved to the default device.
    """
    folder = _find_repository(repo_info, git_host, commit, protocol, use_cache=use_cache)
    with _importable(folder):
        made = _entry(_load_hubconf(folder, entry), entry, folder)(*args, **kwargs)
    return made.to(default_device()) if isinstance(made, nn.Module) else made


def list(
    repo_info: str | os.PathLike[str],
    git_host: str = "github.com",
    use_cache: bool = True,
    commit: str | None = None,
    protocol: str = "HTTPS",
) -> Any:
    """Return the names of a repository's entries."""
    module = import_module(repo_info, git_host, use_cache, commit, protocol)
    return [
        name
        for name in dir(module)
        if not name.startswith("__") and callable(getattr(module, name))
    ]


def help(
    repo_info: str | os.PathLike[str],
    entry: str,
    git_host: str = "github.com",
    use_cache: bool = True,
    commit: str | None = None,
    protocol: str = "HTTPS",
) -> str | None:
    """Return the docstring of an entry."""
    folder = _find_repository(repo_info, git_host, commit, protocol, use_cache=use_cache)
    with _importable(folder):
        return _entry(_load_hubconf(folder, entry), entry, folder).__doc__


def import_module(
    repo_info: str | os.PathLike[str],
    git_host: str = "github.com",
    use_cache: bool = True,
    commit: str | None = None,
    protocol: str = "HTTPS",
) -> ModuleType:
    """Return a repository's `hubconf.py` as a module."""
    folder = _find_repository(repo_info, git_host, commit, protocol, use_cache=use_cache)
    with _importable(folder):
        return _load_hubconf(folder)


def load_serialized_obj_from_url(url: str, model_dir: str | None = None) -> Any:
    """Load the file of a URL from the folder where MegEngine keeps it, `serialized` by default.

    Raises `FileNotFoundError` with the file's place if it is not there.
    """
    folder = Path(model_dir) if model_dir else _home() / "serialized"
    digest = hashlib.sha256(url.encode()).hexdigest()[:6]
    file = folder / f"{digest}_{Path(urlparse(url).path).name}"
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no {file}, and nothing is downloaded here. Download {url} to that path."
        )
    return load_file(file)


class pretrained:
    """Decorator of an entry: with `pretrained=True` load the weights of a URL's local file.

    >>> @pretrained("https://example.org/weights.pkl")
    ... def net():
    ...     return nn.Linear(1, 1)
    >>> net(pretrained=False)
    Linear(in_features=1, out_features=1, bias=True)
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the argument `pretrained`."""

        @functools.wraps(func)
        def make_model(pretrained: bool = False, **kwargs: Any) -> Any:
            if not pretrained:
                return func(**kwargs)
            # Before the network is made: without the file nothing is.
            weights = load_serialized_obj_from_url(self.url)
            model = func(**kwargs)
            model.load_state_dict(weights)
            return model

        return make_model


def _home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("MGE_HOME", cache / "megengine")).expanduser()


def _find_repository(
    repo_info: str | os.PathLike[str],
    git_host: str,
    commit: str | None,
    protocol: str,
    *,
    use_cache: bool,
) -> Path:
    """Return the folder of a repository; raise with the places where it could be."""
    if protocol not in ("HTTPS", "SSH"):
        raise ValueError(f"Invalid protocol {protocol!r}, the value should be one of HTTPS, SSH.")
    if (Path(repo_info).expanduser() / _HUBCONF).is_file():
        return Path(repo_info).expanduser().resolve()
    match = _REPOSITORY.fullmatch(os.fspath(repo_info))
    if match is None:
        raise ValueError(
            f"repo_info: {os.fspath(repo_info)!r} is invalid. Pass 'owner/name[:branch]', or a"
            f" folder with a {_HUBCONF}."
        )
    owner, name, branch = match[1], match[2], match[3] or "master"
    readable = "_".join([owner, name, branch.replace("/", "_"), *([commit] if commit else [])])
    digest = hashlib.sha1(readable.encode(), usedforsecurity=False).hexdigest()[:16]
    hub = _home() / "hub"
    # MegEngine's own folders begin with its version.
    found = [hub / readable, *sorted(hub.glob(f"*_{digest}"), reverse=True)]
    folder = next((place for place in found if (place / _HUBCONF).is_file()), None)
    if folder is None:
        raise FileNotFoundError(
            f"There is no {hub / readable / _HUBCONF}, and nothing is downloaded here. Clone"
            f" https://{git_host}/{owner}/{name} to that folder, or pass the folder of a clone."
        )
    if not use_cache:
        raise UnsupportedError(
            f"use_cache=False would download {owner}/{name} again, and nothing is downloaded here."
            f" Leave use_cache out to use {folder}."
        )
    return folder


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let code import modules of a repository, and this dialect as `megengine`."""
    aliases = {
        "megengine" + name.removeprefix(_DIALECT): module
        for name, module in sys.modules.copy().items()
        if name == _DIALECT or name.startswith(f"{_DIALECT}.")
    }
    others = {
        name: sys.modules.pop(name)
        for name in sys.modules.copy()
        if name == "megengine" or name.startswith("megengine.")
    }
    sys.modules.update(aliases)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in aliases:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def _load_hubconf(folder: Path, entry: str | None = None) -> ModuleType:
    """Execute a `hubconf.py`; if one of its imports fails, only the import of `entry`."""
    path = folder / _HUBCONF
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    module = ModuleType("hubconf")
    module.__file__ = str(path)
    try:
        _execute(tree, path, module)
    except ImportError:
        # megengine/models imports every network there: one of them may need other packages.
        needed = [node for node in tree.body if _imports(node, entry)]
        if not needed:
            raise
        _execute(ast.Module(needed, []), path, module)
    missing = [
        name
        for name in getattr(module, "dependencies", None) or ()
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise RuntimeError(f"Missing dependencies: {', '.join(missing)}. {path} needs them.")
    return module


def _execute(tree: ast.Module, path: Path, module: ModuleType) -> None:
    # What the user passed the repository for.
    exec(compile(tree, str(path), "exec"), vars(module))  # noqa: S102


def _imports(node: ast.stmt, entry: str | None) -> bool:
    return isinstance(node, ast.ImportFrom) and any(
        (alias.asname or alias.name) == entry for alias in node.names
    )


def _entry(module: ModuleType, entry: str, folder: Path) -> Callable[..., Any]:
    found = getattr(module, entry, None)
    if not callable(found):
        names = [name for name in dir(module) if callable(getattr(module, name))]
        raise RuntimeError(
            f"Cannot find callable {entry} in {folder / _HUBCONF}."
            f"{nearest(entry, names)} hub.list({str(folder)!r}) returns its entries."
        )
    return found  # type: ignore[no-any-return]


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
