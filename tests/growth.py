"""How processor time grows with the size of an input."""

import gc
import itertools
import time
from collections.abc import Callable

ROUNDS = 12


def seconds(work: Callable[[], object]) -> float:
    """Return this thread's processor time in seconds, which excludes that of other threads and of
    the garbage collector."""
    gc.disable()
    try:
        begin = time.thread_time()
        work()
        return time.thread_time() - begin
    finally:
        gc.enable()


def growth(small: Callable[[], object], large: Callable[[], object], at_most: float) -> float:
    """Return how many times as long as `small` the call of `large` takes.

    Shared caches and stolen cycles only add time, so the least of several rounds counts. Rounds end
    when the ratio is below `at_most`; a truly larger one stays above in every round.
    """
    least = [float("inf"), float("inf")]
    for done in itertools.count(1):
        least = [min(best, seconds(work)) for best, work in zip(least, (small, large), strict=True)]
        ratio = least[1] / least[0]
        if (done >= 2 and ratio < at_most) or done == ROUNDS:
            return ratio
    raise AssertionError("unreachable")
