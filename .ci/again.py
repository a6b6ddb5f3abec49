"""Judges what `make test` has left, and runs recorded failures once more, alone.

What passes then is printed as flaky. Ends with 1 where a test fails again, or where an invocation
of pytest did not come to its end: a crash, an error of collection, nothing recorded.
"""

import json
import subprocess
import sys
from pathlib import Path

LEFT = Path(".pytest_cache")
AGAIN = LEFT / "again"
FAILED = 1


def recorded(cache: Path) -> set[str]:
    """The tests that failed, which pytest writes down when it ends."""
    path = cache / "v" / "cache" / "lastfailed"
    return set(json.loads(path.read_text())) if path.exists() else set()


def ended(cache: Path) -> bool:
    """Whether an invocation ran to its end, and collected all of its tests."""
    path, failed = cache / "status", recorded(cache)
    if not path.exists() or not (cache / "v" / "cache" / "nodeids").exists():
        return False
    status = int(path.read_text())
    # A name without `::` is a file that could not be imported.
    return status == bool(failed) * FAILED and all("::" in test for test in failed)


def run_again(tests: set[str]) -> tuple[int, set[str]]:
    """The exit status, and what has failed or was not run."""
    path = AGAIN / "v" / "cache" / "lastfailed"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict.fromkeys(tests, True)))
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={AGAIN}", "--ignore=tests/npu"]
    command += ["--last-failed", "--last-failed-no-failures", "none"]
    return subprocess.run(command, check=False).returncode, recorded(AGAIN)


def main() -> int:
    caches = [LEFT / name for name in ("shared", "alone")]
    unfinished = [str(cache) for cache in caches if not ended(cache)]
    if unfinished:
        print(f"did not run to its end: {', '.join(unfinished)}")
        return 1
    tests = set().union(*map(recorded, caches))
    if not tests:
        return 0
    status, left = run_again(tests)
    if flaky := sorted(tests - left):
        print("flaky:", *flaky, sep="\n  ")
    return int(status != 0 or bool(left))


if __name__ == "__main__":
    sys.exit(main())
