"""The seeds that find planted bugs: each bug is looked for with its own first.

    python -m tests.simulation.killers

rewrites `killers.json`, by the bugs' `what`: a seed that still finds its bug stays, for the others
seeds are looked through in their order. Do it when scenarios are drawn differently, or when a bug
is added; a bug that no seed finds is told, and has no line.
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.simulation.mutations import MUTATIONS, Planted, planted
from tests.simulation.scenario import draw
from tests.simulation.world import World

FILE = Path(__file__).with_suffix(".json")
SEEDS, TOKENS = 20_000, 5_000_000
"""How many seeds are looked through, and for how many tokens. The slowest bug needs
most of them."""


def remembered() -> dict[str, int]:
    """The seed of each bug."""
    found: dict[str, int] = json.loads(FILE.read_text())
    return found


def kills(mutation: Planted, seed: int) -> bool:
    """Whether a seed finds a bug."""
    with planted(mutation):
        return _tokens(seed) is None


def search(mutation: Planted) -> int | None:
    """The first seed that finds a bug."""
    tokens = 0
    with planted(mutation):
        for seed in range(SEEDS):
            computed = _tokens(seed)
            if computed is None:
                return seed
            tokens += computed
            if tokens >= TOKENS:
                return None
    return None


def _tokens(seed: int) -> int | None:
    """How many tokens a seed computes; None where it fails."""
    world = World(draw(seed))
    try:
        world.play()
    except (NameError, AttributeError, TypeError) as error:
        if not _is_symptom(error):
            raise
        return None
    except Exception:
        return None
    return world.oracle.counts["tokens"]


def _is_symptom(error: NameError | AttributeError | TypeError) -> bool:
    """Whether an error comes of what a planted bug does, not of a name or a parameter that the code
    no longer has: such a bug would be found by every seed, whatever it is about."""
    if isinstance(error, AttributeError):
        return error.obj is None
    return isinstance(error, TypeError) and "argument" not in str(error)


def _renewed(mutation: Planted, seed: int | None) -> int | None:
    return seed if seed is not None and kills(mutation, seed) else search(mutation)


def main() -> None:
    """Rewrite the file; ends with 1 where a bug is not found."""
    old = remembered() if FILE.exists() else {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        seeds = pool.map(_renewed, MUTATIONS, [old.get(m.what) for m in MUTATIONS])
        new = {m.what: seed for m, seed in zip(MUTATIONS, seeds, strict=True)}
    FILE.write_text(json.dumps({w: s for w, s in new.items() if s is not None}, indent=1) + "\n")
    missed = [what for what, seed in new.items() if seed is None]
    sys.exit(f"not found: {missed}" if missed else 0)


if __name__ == "__main__":
    main()
