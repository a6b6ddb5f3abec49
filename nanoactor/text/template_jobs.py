"""The jobs of requests in the process that runs a model's chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoactor.errors import InvalidRequest
from nanoactor.text.renderer import Done, RenderQueue
from nanoactor.text.template import TemplateFacts

if TYPE_CHECKING:
    from nanoactor.text.tokenizer import Piece

log = logging.getLogger("nanoactor.tokenizer")


class TemplateJobs:
    """The jobs of requests in the template process: their conversations to render, and their texts
    to encode if the tokenizer's run time is not bounded. A request has at most one job at a time.
    Used by the tokenizer actor."""

    def __init__(self, templates: RenderQueue) -> None:
        """`templates` is the queue of the process. No other object adds jobs to it."""
        self._templates = templates
        self._restarts = 0
        """Number of restarts since the process started."""
        self._facts: TemplateFacts | None = None
        """Properties of the chat template; None if there is no usable template."""

    def check_template(self) -> None:
        """Wait until the template is read, and log a warning if it cannot be used. May be called
        only once."""
        try:
            self._facts, problem = self._templates.describe()
        except InvalidRequest as error:
            problem = str(error)
        if problem:
            log.warning("conversations that need a chat template will be refused: %s", problem)
        elif self._templates.note:
            log.warning("%s", self._templates.note)

    def check_options(self, options: str) -> None:
        """Raise `InvalidRequest` if `options` (JSON text) contain one that the chat template does
        not read."""
        try:
            decoded = json.loads(options)
        except RecursionError:  # the user's process may have a higher limit
            raise InvalidRequest("chat_template_kwargs are nested too deeply") from None
        if self._facts is not None:
            self._facts.check(decoded)

    def render(self, uid: int, messages: str, options: str, done: Done) -> None:
        """Queue a request's conversation for rendering, as `RenderQueue.render` does."""
        self._templates.render(self._number(uid), messages, options, done)

    def encode(self, uid: int, pieces: Sequence[Piece], done: Done) -> None:
        """Queue a request's texts to be tokenized, as `RenderQueue.encode` does."""
        self._templates.encode(self._number(uid), pieces, done)

    def cancel(self, uid: int) -> None:
        """Cancel a request's job, if it has an unfinished one. Its callback receives
        `Cancelled`."""
        self._templates.cancel(self._number(uid))

    def restart(self) -> None:
        """Cancel all jobs, because the engine's actors are restarted."""
        self._templates.cancel_all()
        self._restarts += 1

    def _number(self, uid: int) -> int:
        """Return the number of a request's jobs in the queue. It differs after each restart,
        because the queue may still contain jobs from before."""
        return self._restarts << 48 | uid

    def close(self) -> None:
        """End the process."""
        self._templates.close()
