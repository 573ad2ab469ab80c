"""Lint rules on sizes and memory formats: what tensor cores need of matrices and convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mezzo._dtypes import HALF_DTYPES
from mezzo.advising.findings import LintFinding
from mezzo.advising.lint_subject import Subject
from mezzo.advising.op_trace import Product

_MIN_SHARE = 0.01
"""Products with a smaller part of all operations are not worth a change."""
_USEFUL = 1.02
"""Measured gains below this are noise."""
_WIDE_FROM = (8, 0)
"""Compute capability from which sizes should be multiples of 16."""
_RGB = 3
_PADDED_RGB = 4
_CHANNELS = 8
_Sizes = tuple[int, int, int]


def multiple(subject: Subject) -> int | None:
    """Return what sizes should be multiples of; None without tensor cores for this dtype.

    16 bytes are read at once: 8 values, and from compute capability 8.0 on best twice that.
    """
    if subject.hardware.device != "cuda" or subject.dtype is None:
        return None
    if not subject.hardware.support(subject.dtype).native:
        return None
    capability = subject.capability
    return 16 if capability is not None and capability >= _WIDE_FROM else 8


def padded(size: int, to: int) -> int:
    """Return the next multiple.

    >>> padded(30522, 8)
    30528
    """
    return -(-size // to) * to


def matrix_sizes(subject: Subject) -> Iterator[LintFinding]:
    """Find matrix products whose columns or inner size is not a multiple of 8 or 16."""
    to = multiple(subject)
    for product, where in _costly(subject, to):
        rows, columns, inner = product.sizes
        wanted = (rows, padded(columns, to or 1), padded(inner, to or 1))
        if product.kernel or wanted == product.sizes:
            continue
        gain = _measured(subject, product, wanted)
        if gain is not None and gain < _USEFUL:
            continue
        names = {"columns": (columns, wanted[1]), "inner size": (inner, wanted[2])}
        changed = [f"{name} {old} → {new}" for name, (old, new) in names.items() if old != new]
        yield LintFinding(
            "matrix-multiple",
            f"a product of {rows} × {inner} and {inner} × {columns} has sizes that are not"
            f" multiples of {to}",
            where,
            f"Tensor cores read {to} values at once. With other sizes slower kernels run, or the"
            " matrices are copied first.",
            f"Pad: {', '.join(changed)}. For a vocabulary, enlarge the embedding; for a sequence,"
            f" mezzo.pad_batch(batch, {to}).",
            gain,
        )


def batch_size(subject: Subject) -> Iterator[LintFinding]:
    """Find products whose number of rows, which comes from the batch, is not a multiple."""
    to = multiple(subject)
    odd = [
        (product, where)
        for product, where in _costly(subject, to)
        if not product.kernel and product.batch == 1 and product.sizes[0] % (to or 1)
    ]
    if not odd:
        return
    product, where = max(odd, key=lambda pair: pair[0].flops)
    rows, columns, inner = product.sizes
    wanted = padded(rows, to or 1)
    gain = _measured(subject, product, (wanted, columns, inner))
    if gain is not None and gain < _USEFUL:
        return
    yield LintFinding(
        "batch-multiple",
        f"products with {rows} rows, which is not a multiple of {to}",
        where,
        "The rows are the batch, or batch × sequence. Tensor cores compute whole tiles: the rest of"
        " the last one is computed and thrown away.",
        f"A batch with {wanted} rows; drop_last=True for the last batch of an epoch.",
        gain,
    )


def channel_counts(subject: Subject) -> Iterator[LintFinding]:
    """Find convolutions whose channels are not multiples of 8."""
    to = multiple(subject)
    if to is None:
        return
    for product, where in _costly(subject, to):
        pixels, outputs, inputs = product.sizes
        is_first = inputs == _RGB
        wanted = (
            pixels,
            padded(outputs, _CHANNELS),
            inputs if is_first else padded(inputs, _CHANNELS),
        )
        # A convolution of each channel by itself is no matrix product.
        if not product.kernel or product.groups > 1 or wanted == product.sizes:
            continue
        gain = _measured(subject, product, wanted)
        if gain is not None and gain < _USEFUL:
            continue
        yield LintFinding(
            "channel-multiple",
            f"a convolution from {inputs} to {outputs} channels, not multiples of {_CHANNELS}",
            where,
            "cuDNN pads the channels in a copy, or runs without tensor cores.",
            f"{wanted[2]} input and {wanted[1]} output channels.",
            gain,
        )


def first_convolution(subject: Subject) -> Iterator[LintFinding]:
    """Find a first convolution that reads images with 3 channels."""
    to = multiple(subject)
    for product, where in _costly(subject, to):
        if not product.kernel or product.groups > 1 or product.sizes[2] != _RGB:
            continue
        wanted = (product.sizes[0], product.sizes[1], _PADDED_RGB)
        gain = _measured(subject, product, wanted)
        if gain is None or gain >= _USEFUL:
            yield LintFinding(
                "first-convolution",
                f"a convolution reads images with {_RGB} channels",
                where,
                "Tensor cores read 4 or 8 channels at once; cuDNN pads 3 in a copy of the images.",
                f"Pad the images to {_PADDED_RGB} channels with zeros, and the weight likewise:\n"
                "x = F.pad(x, (0, 0, 0, 0, 0, 1))\n"
                "mezzo.TrainStep(..., compile=True) replaces this convolution itself.",
                gain,
            )
        return


def channels_first(subject: Subject) -> Iterator[LintFinding]:
    """Find convolutions that read channels-first images on tensor cores."""
    if multiple(subject) is None or not any(
        isinstance(module, nn.Conv2d) for module in subject.model.modules()
    ):
        return
    if subject.layout_gain is not None and subject.layout_gain < _USEFUL:
        return
    found = [product for product in _half(subject.products) if product.channels_first]
    if found:
        yield LintFinding(
            "channels-first",
            f"{len(found)} convolution{'s' * (len(found) > 1)} with channels first",
            _places(found, subject),
            "Tensor cores compute convolutions with the channels last: each convolution transposes"
            " its input and its output.",
            "model = mezzo.channels_last(model); x = mezzo.channels_last(x)\n"
            "before decorate; mezzo.TrainStep chooses by measuring.",
            subject.layout_gain,
        )


def _costly(subject: Subject, to: int | None) -> Iterator[tuple[Product, str]]:
    """Yield each size of 16-bit products that is a notable part of the operations, with places."""
    products = _half(subject.products)
    total = sum(product.flops for product in products)
    groups: dict[tuple[object, ...], list[Product]] = {}
    for product in products:
        key = (product.sizes, product.kernel, product.batch, product.groups)
        groups.setdefault(key, []).append(product)
    for group in groups.values():
        if to is not None and sum(product.flops for product in group) >= _MIN_SHARE * total:
            yield group[0], _places(group, subject)


def _places(products: Sequence[Product], subject: Subject) -> str:
    places = list(dict.fromkeys(str(product.place) or subject.name for product in products))
    return places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"


def _half(products: Sequence[Product]) -> list[Product]:
    return [product for product in products if product.dtype in HALF_DTYPES]


def _measured(subject: Subject, product: Product, sizes: _Sizes) -> float | None:
    return None if subject.padding_gain is None else subject.padding_gain(product, sizes)
