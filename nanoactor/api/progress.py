"""A progress bar that counts requests and shows prompt and output tokens per second."""

from __future__ import annotations

import time
from typing import Any


class Progress:
    """The progress bar of one call. If it is disabled, all methods do nothing."""

    def __init__(self, requests: int, enabled: bool) -> None:
        self._bar: Any = None
        self._begin = time.monotonic()
        self._prompt = self._output = 0
        if enabled:
            from tqdm import tqdm

            self._bar = tqdm(total=requests, desc="Requests", unit="req", dynamic_ncols=True)

    def add_tokens(self, prompt: int, output: int) -> None:
        """Add newly processed prompt tokens and output tokens to the counts."""
        self._prompt += prompt
        self._output += output
        if self._bar is not None:
            seconds = max(time.monotonic() - self._begin, 1e-9)
            self._bar.set_postfix_str(
                f"prompt {self._prompt / seconds:.0f} tok/s, "
                f"output {self._output / seconds:.0f} tok/s",
                refresh=False,
            )

    def count_finished(self) -> None:
        """Count one more request as finished."""
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        """Close the bar. It stays on the screen."""
        if self._bar is not None:
            self._bar.close()
