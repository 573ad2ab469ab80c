"""Metaclasses of classes that stand for a class of torch."""

from __future__ import annotations

from typing import Any

from mezzo._torch import qualified_name


class _HasCounterpart(type):
    """Metaclass of classes that stand for a class of torch.

    Subclasses do not inherit the counterpart.
    """

    torch_counterpart: type | None

    def __new__(
        cls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        counterpart: type | None = None,
    ) -> Any:
        """Create a class with its counterpart in torch."""
        new_class = super().__new__(cls, name, bases, namespace)
        new_class.torch_counterpart = counterpart
        return new_class

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any
    ) -> None:
        super().__init__(name, bases, namespace)


class EqualsTorch(_HasCounterpart):
    """Metaclass of classes that compare equal to their counterpart in torch.

    Compilers check whether a class is *equal* to torch's and then put torch's region into the
    graph. Compiled, exported and scripted code is therefore the same as without mezzo; the op lists
    are the same in both.
    """

    _jit_override_qualname: str

    def __init__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any
    ) -> None:
        super().__init__(name, bases, namespace)
        if cls.torch_counterpart is not None and qualified_name is not None:
            # TorchScript looks a class up by this name.
            cls._jit_override_qualname = qualified_name(cls.torch_counterpart)

    def __eq__(cls, other: object) -> bool:
        return cls is other or (
            cls.torch_counterpart is not None and cls.torch_counterpart is other
        )

    def __hash__(cls) -> int:
        return type.__hash__(cls if cls.torch_counterpart is None else cls.torch_counterpart)


class AcceptsTorch(_HasCounterpart):
    """Metaclass whose `isinstance` also accepts instances of the counterpart in torch.

    Scalers that torch derives from its own class, such as FSDP's, are then instances too.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (
            cls.torch_counterpart is not None and isinstance(instance, cls.torch_counterpart)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (
            cls.torch_counterpart is not None and issubclass(subclass, cls.torch_counterpart)
        )
