"""One call, however it is written, as one mapping of argument names to values (rule K1)."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from celery_once_fenced.errors import KeyDerivationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["CallPlan"]

_PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class CallPlan:
    """How to bind calls of one task: made once, since ``Signature.bind`` would cost more than all the rest of
    a key.

    ``names`` are the argument names in the order of the signature; ``*args`` and ``**kwargs`` count as one
    argument each, a tuple and a dict.
    """

    __slots__ = ("_defaults", "_given", "_keywords", "_plain", "_positional", "_signature", "names", "task")

    def __init__(self, signature: inspect.Signature, task: str) -> None:
        parameters = signature.parameters
        self.task = task
        self.names = tuple(parameters)
        self._signature = signature
        self._plain = all(p.kind in _PLAIN for p in parameters.values())
        self._positional = tuple(n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._given = tuple(
            frozenset(self._positional[:number]) for number in range(len(self._positional) + 1)
        )
        self._keywords = frozenset(parameters)
        self._defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}

    @classmethod
    def of(cls, function: Callable[..., object], task: str) -> CallPlan:
        """Plan for calls of ``function``: a bound method (``task.run``), so that ``self`` is already gone."""
        return cls(inspect.signature(function), task)

    @property
    def defaults(self) -> Mapping[str, object]:
        """Default values by argument name."""
        return self._defaults

    def bind(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> dict[str, object]:
        """All arguments of a call by name, defaults applied.

        Raises:
            KeyDerivationError: a ``TypeError``: the task cannot be called like this; the argument is named.
        """
        args, kwargs = args or (), kwargs or {}
        bound = self._bind_plain(args, kwargs) if self._plain else None
        return self._bind_fully(args, kwargs) if bound is None else bound

    def _bind_plain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object] | None:
        """None: not certainly a right call; the full binding finds out what is wrong with it."""
        given = len(args)
        if given > len(self._positional):
            return None
        bound = self._defaults.copy()
        bound.update(zip(self._positional, args, strict=False))
        if kwargs:
            if not self._given[given].isdisjoint(kwargs):
                return None
            bound.update(kwargs)
        return bound if bound.keys() == self._keywords else None

    def _bind_fully(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, object]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise KeyDerivationError(self.task, str(error)) from None
        bound.apply_defaults()
        return bound.arguments
