"""Weights of gluoncv on this machine."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_ROOT = "~/.mxnet/models"


def find_weights(name: str, pretrained: bool | str, root: str | os.PathLike[str]) -> Path:
    """Return the `.params` file of a network where gluoncv keeps it; nothing is downloaded.

    `pretrained` is True for any version of the file, or the hash of one. As in gluoncv, the
    environment variable MXNET_HOME replaces `root`. Raises FileNotFoundError.
    """
    home = os.environ.get("MXNET_HOME")
    folder = Path(home, "models") if home else Path(root).expanduser()
    pattern = f"{name}-{pretrained}.params" if isinstance(pretrained, str) else f"{name}-*.params"
    found = sorted(folder.glob(pattern))
    exact = folder / f"{name}.params"
    if pretrained is True and exact.is_file():
        return exact
    if found:
        return found[-1]
    raise FileNotFoundError(
        f"The pretrained weights of {name!r} are not on this machine: there is no file"
        f" {folder / pattern}. Nothing is downloaded here: copy the file that gluoncv downloaded to"
        " this folder, or pass root=. For random weights pass pretrained=False (for SSD"
        " pretrained_base=False)."
    )
