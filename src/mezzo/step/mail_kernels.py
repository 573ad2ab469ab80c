"""The Triton side of `mail.py`: inputs from where the host says that they are, and a loss to where it wants it."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

# mypy and ruff: kernels are not Python, and take pointers, numbers and constants without annotations that would mean anything.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: ANN001, ANN201


# Not specialized: a launch through the compiled kernel then fits any addresses and counts.
@triton.jit(do_not_specialize=["box", "letter", "count", "width"])
def open_kernel(
    box,  # int64 [1 + slots × width] of the host: letters that were done, and the letters
    letter,  # int64 [width]: addresses
    count,  # int64: letters that were done
    width,
    slots: tl.constexpr,
    block: tl.constexpr,  # at least `width`
):
    """Fetch the next letter. One program does, in one request: the host's memory is far away, and others would ask for it thousands of times."""
    lane = tl.arange(0, block)
    row = box + 1 + (tl.load(count) % slots) * width
    tl.store(letter + lane, tl.load(row + lane, mask=lane < width, other=0), mask=lane < width)


@triton.jit(do_not_specialize=["letter", "buffer", "size", "place"])
def bring_kernel(
    letter,
    buffer,
    size,  # elements
    place,  # of the input's address in the letter
    dtype: tl.constexpr,  # of the input, which is aligned to 16 bytes as the buffer is
    held: tl.constexpr,  # of the buffer
    chunk: tl.constexpr,
):
    """Copy an input into its buffer."""
    address = tl.load(letter + place)
    # 64 bits: a tensor may have more than 2^31 bytes.
    start = tl.program_id(0).to(tl.int64) * chunk
    within = tl.arange(0, chunk)
    source = tl.multiple_of(address.to(tl.pointer_type(dtype)) + start, 16) + within
    target = tl.multiple_of(buffer + start, 16) + within
    if size - start >= chunk:
        tl.store(target, tl.load(source).to(held))
    else:
        mask = within < size - start
        tl.store(target, tl.load(source, mask=mask, other=0).to(held), mask=mask)


@triton.jit(do_not_specialize=["box", "letter", "count", "loss", "place"])
def send_kernel(
    box,
    letter,
    count,
    loss,  # float32
    place,
):
    """Put the loss where the letter wants it, if it does, and note that the letter is done."""
    address = tl.load(letter + place)
    if address != 0:
        tl.store(address.to(tl.pointer_type(tl.float32)), tl.load(loss))
    # One thread stores, and what it loaded before is the old count; what others load is not used.
    done = tl.load(count) + 1
    tl.store(count, done)
    tl.store(box, done)
