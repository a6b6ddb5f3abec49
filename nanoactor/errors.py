"""What a user of the engine may have to catch; each message says the cause and the mend."""

from __future__ import annotations


class NanoactorError(Exception):
    """Base of every error that the engine raises."""

    travels = True  # raised in the user's process when it happens in another (runtime.control)


class InvalidRequest(NanoactorError, ValueError):
    """A prompt or a sampling parameter that cannot be served; other requests are unaffected."""


class InvalidConfig(NanoactorError, ValueError):
    """An engine option, or a combination of options, that cannot work."""


class EngineOverloaded(NanoactorError):
    """The waiting queue is full: try again later, or raise its bound."""


class EngineDead(NanoactorError):
    """A part of the engine has died; every waiting request gets this. Start a new engine."""


class EngineClosed(NanoactorError):
    """The engine was closed, or never started."""


class ProtocolBug(NanoactorError, AssertionError):
    """An invariant of the engine broke: a bug in nanoactor. The text tells what led to it."""
