"""Orders of an engine's owner that reach its scheduler beside requests."""

from __future__ import annotations

from nanoactor.runtime.codec import message


@message(17)
class Pause:
    """Frontend to scheduler: plan no steps, until another says otherwise. Steps under way end."""

    paused: bool


@message(18)
class ForgetIndex:
    """Frontend to scheduler, which passes it on to the block manager: what was computed so far is
    found by no request that comes later. Sent again behind a death; a number counts once."""

    number: int
