"""Detection of changes to the model's files. A restarted process must read the same contents as the
processes that are still running.

A file whose size, modification time and inode are unchanged counts as unchanged and is not read.
Any other file must have the same digest as at startup. The engine computes the digest of every file
once, on a background thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fnmatch
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from nanoactor.errors import ModelError
from nanoactor.model_files.files import (
    MODEL_FILE_PATTERNS,
    Fingerprint,
    ModelFiles,
    fingerprint_file,
)

log = logging.getLogger("nanoactor.engine")
T = TypeVar("T")

_TOKENIZER = ("tokenizer.json",)
_TEMPLATE = ("tokenizer_config.json", "special_tokens_map.json", "*.jinja")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_PATTERNS_BY_NODE: Mapping[str, tuple[str, ...]] = {
    "tokenizer": (*_TOKENIZER, *_TEMPLATE),
    "detokenizer": _TOKENIZER,
    "grammar": _TOKENIZER,
    "runner": _WEIGHTS,
    "vision": (),
    "control": (),
}
"""Name patterns of the files that each kind of node (a process of the engine) reads. All other
files are read by the user's process."""
_CHUNK = 1 << 20
_LOWEST_PRIORITY = 19
_JOIN_TIMEOUT = 0.2
"""Maximum time, in seconds, for which `close` waits for the hashing thread."""


class FileFingerprints:
    """The state of the model's files at startup, used to check that restarted nodes (processes of
    the engine) will read the same contents."""

    def __init__(self, files: ModelFiles) -> None:
        """Use the fingerprints in `files`. No file is opened yet."""
        self._files = files
        self._digests: dict[Path, bytes] = {}
        """Digest of each file's contents, by the path at startup."""
        self._directories: dict[Path, int] = {}
        """File descriptor of each directory, by the path at startup. A descriptor still refers to
        its directory after a rename."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start_hashing(self) -> None:
        """Start a thread of the lowest priority that computes the digest of every file."""
        thread = threading.Thread(target=self._hash_all, name="nanoactor-digests", daemon=True)
        try:
            for directory in {path.parent for path in self._files.fingerprints}:
                self._directories[directory] = os.open(directory, os.O_PATH | os.O_DIRECTORY)
            thread.start()
            self._thread = thread
        except (OSError, RuntimeError) as error:  # resources exhausted, or files moved
            log.warning(
                "the model's files could not be hashed, so any change to them, even of a "
                "timestamp, will count as a change of their contents: %s",
                error,
            )

    def _hash_all(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        for path, known in self._files.fingerprints.items():
            with contextlib.suppress(OSError):
                digest = self._digest(path)
                # If not, the file was changed before its digest was computed.
                if digest and fingerprint_file(path) == known:
                    self._digests[path] = digest

    def _digest(self, path: Path) -> bytes:
        """Return a file's 32-byte digest, or b"" if the engine is closed before it is complete."""
        hasher = hashlib.blake2b(digest_size=32)
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                if self._stopping:
                    return b""
                hasher.update(chunk)
        return hasher.digest()

    def close(self) -> None:
        """Stop the hashing thread and close the file descriptors."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT)
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories = {}

    async def check(self, nodes: Iterable[str]) -> ModelFiles | None:
        """Check that the files read by `nodes` have not changed.

        Returns the model's files at their new location if their directory was moved, else None.
        Raises `ModelError` if a file is gone or its contents have changed.
        """
        patterns = {pattern for node in nodes for pattern in _patterns_read_by(node)}
        paths = [
            path
            for path in self._files.fingerprints
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
        ]
        current_paths = {path: self._current_path(path) for path in paths}
        changed = {
            path: current
            for path, current in current_paths.items()
            if self._describe_change(path, current) is not None
        }
        if changed:
            await _on_thread(lambda: self._compare_digests(changed))
        return self._relocated(current_paths)

    def _current_path(self, path: Path) -> Path:
        """Return the current path of a file, which differs from `path` if its directory was
        renamed."""
        descriptor = self._directories.get(path.parent)
        if path.exists() or descriptor is None:
            return path
        with contextlib.suppress(OSError):
            path_now = Path(os.readlink(f"/proc/self/fd/{descriptor}")) / path.name
            if path_now.exists():
                return path_now
        return path

    def _describe_change(self, path: Path, current: Path) -> str | None:
        """Return how a file's metadata differs from its fingerprint: "replaced" if the inode
        differs, "changed" if only the size or the time does, None if nothing does.

        Raises `ModelError` if the file is gone.
        """
        try:
            now = fingerprint_file(current)
        except OSError:
            raise ModelError(
                f"{path} has disappeared since the engine was started; restore it, or start a "
                "new engine"
            ) from None
        known: Fingerprint = self._files.fingerprints[path]
        if now == known:
            return None
        return "replaced" if now[2] != known[2] else "changed"

    def _compare_digests(self, current_paths: Mapping[Path, Path]) -> None:
        """Compare the files' digests with those at startup. Reads all of the files, so it should
        run on a thread. Raises `ModelError` if a file's contents have changed."""
        for path, current in current_paths.items():
            change, digest = self._describe_change(path, current), self._digests.get(path)
            same_size = current.stat().st_size == self._files.fingerprints[path][0]
            if not (digest and same_size and self._digest(current) == digest):
                raise ModelError(
                    f"{path} has been {change} since the engine was started; start a new engine"
                )
            log.warning("%s was %s but still has the same contents", path, change)

    def _relocated(self, current_paths: Mapping[Path, Path]) -> ModelFiles | None:
        new_directories = {
            path.parent: current.parent
            for path, current in current_paths.items()
            if path != current
        }
        if not new_directories:
            return None
        files, tokenizer = self._files, self._files.tokenizer_directory
        for before, after in new_directories.items():
            log.warning("%s was moved to %s", before, after)
        return dataclasses.replace(
            files,
            directory=new_directories.get(files.directory, files.directory),
            tokenizer_directory=new_directories.get(tokenizer, tokenizer) if tokenizer else None,
        )


def _patterns_read_by(node: str) -> Collection[str]:
    """Return the name patterns of the files that a node, such as "runner.0", reads; all patterns
    for an unknown kind of node."""
    return _PATTERNS_BY_NODE.get(node.partition(".")[0], MODEL_FILE_PATTERNS)


async def _on_thread(work: Callable[[], T]) -> T:
    """Run `work` on a new thread and return its result. The event loop's thread pool is not used,
    because other work may occupy it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    try:
        threading.Thread(target=run, name="nanoactor-compare", daemon=True).start()
    except RuntimeError:  # no thread is available: block the loop, as the engine must wait anyway
        return work()
    return await done
