"""Control messages from an engine's owner (the user of `AsyncLLM`) to its scheduler."""

from __future__ import annotations

from nanoactor.runtime.codec import message


@message(17)
class Pause:
    """Frontend to scheduler: stop planning steps, or resume. Steps in flight still finish."""

    paused: bool


@message(18)
class ForgetIndex:
    """Frontend to scheduler, which forwards it to the block manager: clear the prefix cache index,
    so that no later request reuses earlier results. The message is sent again after a process has
    died, but each number takes effect only once."""

    number: int
