"""python -m tests.simulation.play FIRST [STRIDE [TOKENS]]: play seeds, one after the other.

Prints what was counted, as JSON. A seed that fails is shrunk, its stories are printed, and the
process ends with 1.
"""

import json
import sys
from collections import Counter

from tests.simulation.shrinking import check


def play(first: int, stride: int = 1, tokens: int = 1) -> Counter[str]:
    """Every `stride`-th seed from `first`, until so many tokens were computed."""
    total: Counter[str] = Counter()
    seed = first
    while total["tokens"] < tokens:
        total += check(seed).oracle.counts
        seed += stride
    return total


if __name__ == "__main__":
    try:
        print(json.dumps(play(*map(int, sys.argv[1:]))))
    except AssertionError as error:
        print(error)
        sys.exit(1)
