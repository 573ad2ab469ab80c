"""Compare two of Paddle's logs of tensors in a workbook: an .xlsx file without other packages."""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch

_FIELD = re.compile(r"(\w+)=([^,\]\s]*)")
_LARGEST = torch.finfo(torch.float16).max
_MAX_NUMEL = 2**31 - 1
_TITLES = (
    "op_type tensor_name numel infinite dtype max_value min_value mean_value num_zero dtype"
    " max_value min_value mean_value num_zero num_inf num_nan max_value min_value mean_value"
).split()

Cell = str | int | float | None


@dataclass(frozen=True)
class LoggedTensor:
    """One line of a log."""

    op: str
    name: str
    dtype: str
    numel: int
    max: float
    min: float
    mean: float
    zero: int
    inf: int
    nan: int

    @classmethod
    def parse(cls, line: str) -> LoggedTensor | None:
        """Read a line; None if it is none of the log's."""
        if "[PRECISION]" not in line:
            return None
        fields = dict(_FIELD.findall(line))
        try:
            return cls(
                fields["op"],
                fields.get("tensor", ""),
                fields["dtype"],
                int(fields["numel"]),
                float(fields["max"]),
                float(fields["min"]),
                float(fields["mean"]),
                *(int(fields.get(name, 0)) for name in ("num_zero", "num_inf", "num_nan")),
            )
        except (KeyError, ValueError):
            print(f"!! Error parsing {line}")  # noqa: T201 - as Paddle does
            return None

    @property
    def is_infinite(self) -> bool:
        """Whether float16 cannot represent its values."""
        extremes = (self.max, self.min)
        fits = all(abs(value) <= _LARGEST for value in extremes)  # False for NaN too
        return not fits or bool(self.inf or self.nan) or self.numel > _MAX_NUMEL


def write_comparison(
    full_path: str | os.PathLike[str],
    half_path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    loss_scale: float,
) -> None:
    """Write one sheet for each log `worker_*` of the first folder."""
    logs = sorted(path.name for path in Path(full_path).iterdir() if "worker_" in path.name)
    if not logs:
        raise FileNotFoundError(
            f"{os.fspath(full_path)!r} has no logs named worker_*. Write them by"
            " TensorCheckerConfig(enable=True, debug_mode=DebugMode.CHECK_ALL, output_dir=...)."
        )
    sheets: dict[str, list[list[Cell]]] = {}
    for log in logs:
        pairs = merge(read_log(Path(full_path) / log), read_log(Path(half_path) / log))
        labels: list[Cell] = [None] * len(_TITLES)
        labels[4], labels[9], labels[16] = "fp32", f"fp16 (scale={loss_scale})", "fp16 / fp32"
        sheets[log] = [labels, list(_TITLES), *(_row(*pair) for pair in pairs)]
        infinite = dict.fromkeys(str(row[0]) for row in sheets[log][2:] if row[3] == 1)
        print(f"-- OP Types produce infinite outputs: {list(infinite)}")  # noqa: T201 - as Paddle
    write_workbook(output, sheets)
    print(f"-- Write to {os.fspath(output)}\n")  # noqa: T201 - as Paddle does


def read_log(path: Path) -> list[LoggedTensor]:
    """Return the tensors of a log; none, with a note, if there is no such file."""
    if not path.is_file():
        print(f"the file  {path} is not found")  # noqa: T201 - as Paddle does
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    parsed = (LoggedTensor.parse(line) for line in lines)
    return [tensor for tensor in parsed if tensor is not None]


def merge(
    full: Sequence[LoggedTensor], half: Sequence[LoggedTensor]
) -> list[tuple[str, LoggedTensor | None, LoggedTensor | None]]:
    """Pair the tensors of two logs by op, name and how often that has occurred before."""
    keyed = {_key(tensor, number): tensor for tensor, number in _numbered(full)}
    pairs: list[tuple[str, LoggedTensor | None, LoggedTensor | None]] = []
    for tensor, number in _numbered(half or full):
        match = keyed.get(_key(tensor, number))
        pairs.append((f"{tensor.name}#{number}", match, tensor if half else None))
    return pairs


def _numbered(tensors: Iterable[LoggedTensor]) -> list[tuple[LoggedTensor, int]]:
    seen: Counter[str] = Counter()
    numbered = []
    for tensor in tensors:
        key = _key(tensor, 0)
        numbered.append((tensor, seen[key]))
        seen[key] += 1
    return numbered


def _key(tensor: LoggedTensor, number: int) -> str:
    name = tensor.name.replace(".cast_fp16", "").replace(".cast_fp32", "")
    return f"{tensor.op}/{name}#{number}"


def _row(name: str, full: LoggedTensor | None, half: LoggedTensor | None) -> list[Cell]:
    present = half or full
    if present is None:
        return []
    infinite = any(tensor.is_infinite for tensor in (full, half) if tensor is not None)
    row: list[Cell] = [present.op, name, present.numel, int(infinite)]
    for tensor in (full, half):
        values = (
            (tensor.dtype, tensor.max, tensor.min, tensor.mean, tensor.zero)
            if tensor
            else ("--",) * 5
        )
        row += values
    row += (half.inf, half.nan) if half else ("--",) * 2
    for field in ("max", "min", "mean"):
        if full is None or half is None:
            row.append("--")
        else:
            divisor = getattr(full, field)
            row.append(getattr(half, field) / divisor if divisor else 1.0)
    return row


# -- the workbook ----------------------------------------------------------------------------------

_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_TYPE = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_HEAD = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def write_workbook(output: str | os.PathLike[str], sheets: dict[str, list[list[Cell]]]) -> None:
    """Write sheets by name to an .xlsx file."""
    numbers = range(1, len(sheets) + 1)
    overrides = "".join(
        f'<Override PartName="/xl/worksheets/sheet{n}.xml" ContentType="{_TYPE}.worksheet+xml"/>'
        for n in numbers
    )
    names = "".join(
        f'<sheet name="{escape(name[:31])}" sheetId="{n}" r:id="rId{n}"/>'
        for n, name in zip(numbers, sheets, strict=True)
    )
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels"'
        ' ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPE}.sheet.main+xml"/>'
        f"{overrides}</Types>",
        "_rels/.rels": _relations([("officeDocument", "xl/workbook.xml")]),
        "xl/workbook.xml": f'<workbook xmlns="{_MAIN}" xmlns:r="{_RELATIONS}">'
        f"<sheets>{names}</sheets></workbook>",
        "xl/_rels/workbook.xml.rels": _relations(
            [("worksheet", f"worksheets/sheet{n}.xml") for n in numbers]
        ),
    }
    for n, rows in zip(numbers, sheets.values(), strict=True):
        cells = "".join(f"<row>{''.join(map(_cell, row))}</row>" for row in rows)
        parts[f"xl/worksheets/sheet{n}.xml"] = (
            f'<worksheet xmlns="{_MAIN}"><sheetData>{cells}</sheetData></worksheet>'
        )
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in parts.items():
            archive.writestr(path, _HEAD + text)


def _relations(targets: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<Relationship Id="rId{n}" Type="{_RELATIONS}/{kind}" Target="{target}"/>'
        for n, (kind, target) in enumerate(targets, 1)
    )
    return f'<Relationships xmlns="{_PACKAGE}/relationships">{items}</Relationships>'


def _cell(value: Cell) -> str:
    # Workbooks have no NaN and no infinity.
    if isinstance(value, int) or (isinstance(value, float) and abs(value) < float("inf")):
        return f"<c><v>{value}</v></c>"
    text = "" if value is None else escape(str(value))
    return f'<c t="inlineStr"><is><t>{text}</t></is></c>'
