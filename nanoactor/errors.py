"""Errors that users of the engine may have to catch. Each message states the cause and the fix.

The lower layers (`models` and `runtime`) do not depend on the engine, so their errors cannot derive
from its base class. When such an error leaves the engine, `translated` converts it to a class that
derives from both the original class and `NanoactorError`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from nanoactor.models import errors as models
from nanoactor.runtime import errors as runtime


class NanoactorError(Exception):
    """Base class of every error that the engine raises."""

    picklable = True  # raised again in the caller's process


class InvalidRequest(NanoactorError, ValueError):
    """A prompt or a sampling parameter is invalid. Other requests are unaffected."""


class InvalidConfig(NanoactorError, ValueError):
    """An engine option is invalid, or a combination of options cannot work."""


class RequestAborted(NanoactorError):
    """The request was aborted and has no result."""


class EngineOverloaded(NanoactorError):
    """The waiting queue is full. Try again later, or raise the limit on waiting requests."""


class OutOfResources(NanoactorError):
    """The machine has run out of a resource that the request needs: memory, threads, processes,
    file descriptors or disk space. The request itself is valid and may succeed later."""


def out_of_resources(error: BaseException) -> OutOfResources:
    """Convert an error of the operating system or of Python, such as `OSError` or `MemoryError`, to
    an `OutOfResources` that states the cause."""
    if isinstance(error, OSError) and error.errno is not None:
        told = os.strerror(error.errno)  # the error's own text may name files
    else:
        told = " ".join(str(error).split()) or "there is not enough memory"
    return OutOfResources(
        f"the machine is out of a resource that the request needs: {told}; try again later"
    )


class EngineDead(NanoactorError):
    """The engine's processes have died more often than `max_restarts` allows. Every unfinished
    request fails with this error. To continue, start a new engine."""


def engine_dead(error: BaseException) -> EngineDead:
    """Return an `EngineDead` with a one-line message and the fatal `error` as its cause."""
    failure = EngineDead(" ".join(f"the engine has died: {error}".split()))
    failure.__cause__ = error
    return failure


class EngineClosed(NanoactorError):
    """The engine was closed or never started."""


class ComputationFailed(NanoactorError):
    """The request could not be completed: the model produced NaN or infinity for it, its grammar's
    mask of allowed tokens did not arrive in time, or it could not resume after a process had died.
    Other requests are unaffected."""


class PoisonRequest(ComputationFailed):
    """An engine process died each time this request ran, the last time while it ran alone. The
    request is not retried."""


class HoldExpired(NanoactorError):
    """A paused request ended because its caller did not resume it within `hold_timeout` seconds."""


class ProtocolBug(NanoactorError, AssertionError):
    """An invariant of the engine was violated, which is a bug in nanoactor. The message has the
    details."""


class ModelError(NanoactorError, models.ModelError):
    """A model cannot be loaded."""


class UnsupportedModel(ModelError, models.UnsupportedModel):
    """The model's configuration requires a feature that is not implemented."""


class WeightsError(ModelError, models.WeightsError):
    """A weight file is missing or damaged, or does not match the configuration."""


class NotEnoughMemory(ModelError, models.NotEnoughMemory):
    """The KV cache would be too small to serve one sequence."""


class EngineFault(NanoactorError, runtime.RuntimeFault):
    """The engine's processes could not be started, or one of them has failed."""


class StartupFailed(EngineFault, runtime.StartupFailed):
    """A process did not become ready: it raised, died or missed the deadline."""


class NodeDied(EngineFault, runtime.NodeDied):
    """A process of the engine ended while it was still needed."""


class NotUsableHere(EngineFault, runtime.NotUsableHere):
    """The engine is used in an event loop or a process other than the one that started it."""


class UnsupportedPlatform(EngineFault, runtime.UnsupportedPlatform):
    """The operating system or the Python installation lacks something that the engine needs."""


_OURS: dict[type[BaseException], type[NanoactorError]] = {
    ours.__bases__[1]: ours
    for ours in (
        ModelError,
        UnsupportedModel,
        WeightsError,
        NotEnoughMemory,
        EngineFault,
        StartupFailed,
        NodeDied,
        NotUsableHere,
        UnsupportedPlatform,
    )
}


P = ParamSpec("P")
T = TypeVar("T")


def translated(error: BaseException) -> BaseException:
    """Convert an error of a lower layer or of the operating system to the equivalent
    `NanoactorError`. Return any other error unchanged."""
    if isinstance(error, NanoactorError):
        return error
    ours = next((_OURS[cls] for cls in type(error).__mro__ if cls in _OURS), None)
    if ours is not None:
        made: NanoactorError = ours(*error.args)
        made.__cause__ = error.__cause__
        return made.with_traceback(error.__traceback__)
    if runtime.is_out_of_resources(error):
        made = out_of_resources(error)
        made.__cause__ = error
        return made
    return error


@contextlib.contextmanager
def only_ours() -> Iterator[None]:
    """Context manager that converts errors of the lower layers or of the operating system to
    `NanoactorError`. Other errors pass through unchanged."""
    try:
        yield
    except Exception as error:
        made = translated(error)
        if made is error:
            raise
        raise made from made.__cause__


def public(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the public API so that it raises only `NanoactorError`.

    A call whose arguments do not match the function's parameters raises `InvalidRequest`. An
    exception of any other class is a bug and becomes the cause of a `ProtocolBug`.
    """
    signature = inspect.signature(function)

    def ours(error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception:
        made = translated(error)
        if isinstance(made, NanoactorError):
            return made
        try:
            signature.bind(*args, **kwargs)
        except TypeError as wrong:
            return InvalidRequest(f"{function.__name__}: {wrong}")
        bug = ProtocolBug(f"{function.__name__}: {type(error).__name__}: {error}")
        bug.__cause__ = error
        return bug

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except Exception as error:
                made = ours(error, args, kwargs)
                raise made from made.__cause__

        return cast(Callable[P, T], awaited)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            made = ours(error, args, kwargs)
            raise made from made.__cause__

    return called
