"""The exact weights behind the 16-bit parameters of one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch

from mezzo.optim.kinds import KINDS, Draw, Kind, values_of
from mezzo.policy.rule import Master

Parameter = torch.nn.Parameter

VERSION = attrgetter("_version")


class Masters:
    """What lies beside each 16-bit parameter, and the float32 value that both make up.

    A parameter may be written by others (`clamp_`, `load_state_dict`, a copy of averaged weights): its value then counts, not what lay beside the old one.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0 + 2.0**-20]))
    >>> masters = Masters("split")
    >>> masters.adopt(weight, torch.bfloat16)
    >>> weight.data, masters.read(weight)[1].item() == 1.0 + 2.0**-20
    (tensor([1., 1.], dtype=torch.bfloat16), True)
    """

    def __init__(self, master: str | Master = Master.FLOAT32, seed: int = 0) -> None:
        self.kind: Kind = KINDS[Master.parse(master)]
        self.seed = seed
        self.generation = 0
        """Counts what replaced a tensor that lies beside a parameter: tables of addresses are good for one generation."""
        self._beside: dict[torch.Tensor, torch.Tensor | None] = {}
        # By `id`: to hash a tensor is a call into Python, which for 150 parameters takes 100 µs a step.
        self._seen: dict[int, int] = {}
        """Parameter → the version at which what lies beside it was its."""
        self._trusted: set[int] = set()
        """Parameters whose neighbour was just loaded: the parameter itself may be loaded before it or after it."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._beside

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._beside)

    def adopt(self, parameter: Parameter, half: torch.dtype) -> None:
        """Make a float32 parameter 16-bit, the same object, and keep its exact value."""
        value = parameter.detach()
        rounded, beside = self.kind.part(value.float(), half)
        parameter.data = _laid_out_as(value, rounded)
        self._beside[parameter] = None if beside is None else _laid_out_as(value, beside)
        self._note(parameter)
        self.generation += 1

    def release(self, parameter: Parameter) -> None:
        """Give a parameter its exact float32 value back, and forget it."""
        parameter.data = self.read(parameter)
        del self._beside[parameter], self._seen[id(parameter)]
        self._trusted.discard(id(parameter))
        self.generation += 1

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 value of a parameter, exact as far as its kind is; a tensor of its own."""
        self.follow(parameter)
        # Ops between tensors forget the strides of dimensions of size 1, by which torch tells channels_last.
        return _laid_out_as(parameter, self.kind.join(parameter.detach(), self._beside[parameter]))

    def write(self, parameter: torch.Tensor, value: torch.Tensor, draw: Draw | None = None) -> None:
        """Set the float32 value of a parameter: both it and what lies beside it, in place."""
        rounded, beside = self.kind.part(value, parameter.dtype, draw)
        with torch.no_grad():
            parameter.copy_(rounded)
            held = self._beside[parameter]
            if held is not None and beside is not None:
                held.copy_(beside)
        self._note(parameter)

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """The float32 value of a parameter: the live master where masters are float32 tensors, else a copy."""
        value, held = self.read(parameter), self._beside[parameter]
        return held.copy_(value) if held is not None and held.dtype is torch.float32 else value

    def reader(self, parameters: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """A function that gives the float32 values of these parameters in few launches: live masters where they are float32 tensors, else copies.

        It is good for as long as `generation` is the same.
        """
        parameters, beside = list(parameters), [self._beside[parameter] for parameter in parameters]
        versions: list[int] = []

        def read() -> list[torch.Tensor]:
            if list(map(VERSION, parameters)) != versions:
                self.refresh(parameters)
                versions[:] = map(VERSION, parameters)
            return values_of(self.kind, parameters, beside)

        return read

    def hold(self, parameter: torch.Tensor) -> Callable[[], None]:
        """Copy a parameter and what lies beside it; what comes back writes both back, to the bit and in place."""
        self.refresh([parameter])
        held = self._beside[parameter]
        value, beside = parameter.detach().clone(), None if held is None else held.clone()

        def restore() -> None:
            with torch.no_grad():
                parameter.copy_(value)
                if held is not None and beside is not None:
                    held.copy_(beside)
            # Else the next step would take the parameter for one that others wrote, and drop its remainder.
            self._note(parameter)

        return restore

    def beside(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What lies beside a parameter."""
        return self._beside[parameter]

    def follow(self, parameter: torch.Tensor) -> bool:
        """Where others wrote a parameter, drop what lay beside the old value; say whether they did. A float32 master compares values, and is left to that."""
        if parameter._version == self._seen[id(parameter)]:
            return False
        beside = self._beside[parameter]
        if beside is not None and id(parameter) not in self._trusted and self.kind.master is not Master.FLOAT32:
            beside.zero_()
        self._note(parameter)
        return True

    def refresh(self, parameters: Sequence[torch.Tensor]) -> None:
        """Where others wrote one of these parameters, let its master follow."""
        for parameter in parameters:
            if self.follow(parameter) and self.kind.master is Master.FLOAT32:
                # Compared value by value, once; the kernel looks at the first of each block only.
                self.write(parameter, self.read(parameter))

    def noted(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Somebody wrote these parameters together with what lies beside them; their versions."""
        versions = list(map(VERSION, parameters))
        self._seen.update(zip(map(id, parameters), versions, strict=True))
        if self._trusted:
            self._trusted.difference_update(map(id, parameters))
        return versions

    def load(self, parameter: torch.Tensor, beside: torch.Tensor) -> None:
        """Take over what lay beside a parameter when it was saved. The parameter may be loaded before or after."""
        held = self._beside[parameter]
        if held is not None:
            held.copy_(beside)
            self._trusted.add(id(parameter))
            self._seen[id(parameter)] = parameter._version

    def _note(self, parameter: torch.Tensor) -> None:
        self._seen[id(parameter)] = parameter._version
        self._trusted.discard(id(parameter))


def _laid_out_as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of another tensor: parameter, gradient, master and state go through one kernel side by side."""
    return new if new.stride() == old.stride() else torch.empty_like(old, dtype=new.dtype).copy_(new)
