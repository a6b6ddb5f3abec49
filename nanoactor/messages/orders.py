"""Control messages from an engine's owner to its scheduler."""

from __future__ import annotations

from nanoactor.runtime.codec import message


@message(17)
class Pause:
    """Frontend to scheduler: stop or resume planning steps. Steps in flight finish."""

    paused: bool


@message(18)
class ForgetIndex:
    """Frontend to scheduler, which forwards it to the block manager: no later request reuses any
    earlier results. Sent again after a process has died; each number takes effect once."""

    number: int
