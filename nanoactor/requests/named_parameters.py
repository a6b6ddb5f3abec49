"""Checks of parameter names: an unknown name is rejected, and the error suggests the name that was
probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from nanoactor.errors import InvalidRequest

_MIN_SIMILARITY = 0.85
"""Minimum similarity, from 0 to 1, of two names for a suggestion. A wrong suggestion is worse than
none."""
C = TypeVar("C", bound=type[Any])


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean NAME?" with the most similar known name, as a suffix for an error
    message. Return an empty string if no known name is similar."""
    close = difflib.get_close_matches(name, [*known], 1, _MIN_SIMILARITY)
    return f": did you mean {close[0]}?" if close else ""


def rejects_unknown_parameters(ignored: Mapping[str, Sequence[Any]]) -> Callable[[C], C]:
    """Return a class decorator that makes a dataclass's constructor raise `InvalidRequest` for
    unknown parameters.

    `ignored` maps the names of parameters that have no effect to their accepted values. None is
    always accepted.
    """

    def decorate(cls: C) -> C:
        original_init = cls.__init__
        signature = inspect.signature(original_init)
        name = cls.__name__

        @functools.wraps(original_init)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for key in given.keys() & ignored.keys():
                value = given.pop(key)
                if value is not None and value not in ignored[key]:
                    shown = " or ".join(map(repr, ignored[key]))
                    raise InvalidRequest(f"{key} is not supported; only {shown} is accepted")
            known = [key for key in signature.parameters if key != "self"]
            for key in given:
                if key not in known:
                    raise InvalidRequest(
                        f"{name} has no parameter {key!r:.100}{suggestion(key, known)}"
                    )
            try:
                signature.bind(self, *args, **given)
            except TypeError as error:
                raise InvalidRequest(f"{name}: {error}; pass parameters by name") from None
            original_init(self, *args, **given)

        cls.__init__ = init
        return cls

    return decorate
