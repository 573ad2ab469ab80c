"""`mxnet.test_utils.download_model` for files that are on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mezzo.compat._missing import module_getattr
from mezzo.compat.mxnet._substitutions import SUBSTITUTIONS

__all__ = ["download_model"]


def download_model(
    model_name: str, dst_dir: str | os.PathLike[str] = "./", meta_info: Any = None
) -> tuple[str, int]:
    """Return prefix and epoch of a model whose two files are in `dst_dir`; nothing is downloaded.

    Raises FileNotFoundError if they are not there. MXNet's own returns existing files too.
    """
    prefix = Path(dst_dir) / model_name
    files = [Path(f"{prefix}-symbol.json"), Path(f"{prefix}-0000.params")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"download_model({model_name!r}) needs {' and '.join(map(str, files))}; missing:"
            f" {', '.join(missing)}. Nothing is downloaded here: copy both files to"
            f" {Path(dst_dir).resolve()}."
        )
    return str(prefix), 0


__getattr__ = module_getattr(__name__, SUBSTITUTIONS)
