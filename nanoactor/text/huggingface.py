"""All uses of transformers: loading a tokenizer for users, and converting the tokenizer of a model
that has no `tokenizer.json`.

No other module of the engine imports transformers, and none of the engine's processes loads it.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoactor.models.errors import ModelError
from nanoactor.runtime.native import native_calls
from nanoactor.runtime.process import die_with_parent, interpreter, working_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase

log = logging.getLogger("nanoactor.tokenizer")

_TOKENIZER = "tokenizer.json"
_SOURCES = (("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Groups of files. If all files of a group exist, transformers can create a `tokenizer.json` from
them."""
_DESCRIPTIONS = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Other files that the conversion reads, if they exist."""
_OUTPUTS = ("tokenizer_config.json", _TOKENIZER)
"""Files that a conversion creates, in the order in which they are moved to the cache. The first one
contains special tokens and chat templates."""


def load_pretrained(directory: Path, **options: Any) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer with transformers, from local files only. `options` are passed to
    `from_pretrained`.

    Raises `ModelError` if transformers cannot load it.
    """
    from transformers import AutoTokenizer

    outer = sys.exception()
    try:
        with native_calls():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as error:  # invalid files may raise any exception
        reason = _reason(error, outer)
        text = f"transformers cannot load the tokenizer of {directory}: {reason}"
        raise ModelError(text) from reason
    return tokenizer


def _reason(error: BaseException, outer: BaseException | None) -> BaseException:
    """Return the original error if transformers raised an `ImportError` while handling it. Return
    any other `error` unchanged.

    transformers 4 and 5.0 look for protobuf whenever they handle an error. If protobuf is missing,
    they raise an error about that, whatever is wrong with the files. `outer` is the error that the
    caller was already handling, which is never the reason.
    """
    while isinstance(error, ImportError):
        handled = error.__context__
        if handled is None or handled is outer:
            break
        error = handled
    return error


class LazyTokenizer:
    """A model's tokenizer that is loaded on first use. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: PreTrainedTokenizerBase | None = None

    def load(self, directory: Path) -> PreTrainedTokenizerBase:
        """Return the tokenizer, the same object each time; `directory` is read only by the first
        call. Raises the errors of `load_pretrained`."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load_pretrained(directory)
            return self._loaded


def find_tokenizer(directory: Path, timeout: float) -> Path:
    """Return the directory with a model's `tokenizer.json`, special tokens and chat template.

    This is the model's own directory if it contains a `tokenizer.json`. Otherwise, transformers
    converts the model's files within `timeout` seconds. The result is stored in the user's cache
    for later calls, or in a temporary directory if the cache is not writable. Raises `ModelError`
    if the conversion fails.
    """
    if (directory / _TOKENIZER).exists():
        return directory
    _check_sources(directory)
    try:
        cached = _cache_directory() / _fingerprint(directory)
        if (cached / _TOKENIZER).exists():
            return cached
        cached.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=cached)
    except (OSError, RuntimeError) as error:  # read-only or full, or no home directory
        log.warning(
            "converted tokenizers cannot be cached, so each start converts them again: %s", error
        )
        cached = Path(tempfile.mkdtemp(prefix="nanoactor-tokenizer-"))
        atexit.register(shutil.rmtree, cached, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(dir=cached)
    log.warning(
        "%s has no tokenizer.json; converting its tokenizer once, which takes some seconds",
        directory,
    )
    with scratch as output:
        _run_conversion(directory, output, timeout)
        # Other engines may convert at the same time. The last file exists only if all are complete.
        for name in _OUTPUTS:
            os.replace(Path(output) / name, cached / name)
    return cached


def _check_sources(directory: Path) -> None:
    if not any(all((directory / name).exists() for name in source) for source in _SOURCES):
        names = " or ".join(" with ".join(source) for source in _SOURCES)
        raise ModelError(
            f"{directory} has no tokenizer.json and no files from which one can be created "
            f"({names}); add one of them, or serve only token ids with skip_tokenizer_init=True"
        )


def _cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nanoactor" / "tokenizers"


def _fingerprint(directory: Path) -> str:
    """Return a hash of all files that a conversion reads and of the version of transformers."""
    import importlib.metadata  # imports e-mail and archive packages; every actor loads this module

    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for name in (*itertools.chain(*_SOURCES), *_DESCRIPTIONS):
        path = directory / name
        if path.exists():
            content = path.read_bytes()
            digest.update(f"\n{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _run_conversion(directory: Path, target: str, timeout: float) -> None:
    """Run `convert` in a separate process, so that no long-lived process loads transformers."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    program = (
        f"import sys; sys.path[:] = {path!r}; from nanoactor.text.huggingface import convert; "
        f"convert({os.getpid()}, {str(directory)!r}, {target!r})"
    )
    failure = f"the tokenizer of {directory} cannot be converted into a tokenizer.json"
    try:
        result = subprocess.run(  # noqa: S603 - our own interpreter and program
            [interpreter(), "-c", program],
            cwd=working_directory(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{failure} within the start_timeout of {timeout:g} s") from None
    if result.returncode:
        message = result.stderr.strip() or f"the process ended with status {result.returncode}"
        hint = "A tokenizer.model may need the packages sentencepiece and protobuf. "
        raise ModelError(
            f"{failure}: {message.splitlines()[-1].rstrip('.')}. "
            + (hint if (directory / "tokenizer.model").exists() else "")
            + "Add a tokenizer.json, or serve only token ids with skip_tokenizer_init=True"
        ) from RuntimeError(message)


def convert(parent: int, directory: str, target: str) -> None:
    """Convert a tokenizer and write the files of `_OUTPUTS` to `target`. Runs as the main function
    of a process, which ends if the process with the id `parent` does. If the conversion fails, the
    last line on standard error is the reason."""
    die_with_parent(parent, "convert")
    # Hide torch: it takes seconds to load, and tokenizers do not need it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        tokenizer = load_pretrained(Path(directory))
    except ModelError as error:
        raise SystemExit(" ".join(str(error.__cause__).split())) from error
    kind = type(tokenizer).__name__
    if len(tokenizer.get_vocab()) == len(tokenizer.get_added_vocab()):  # it reads other files
        raise SystemExit(f"transformers' {kind} found no vocabulary in the model's files")
    tokenizer.save_pretrained(target, save_jinja_files=False)
    if not (Path(target) / _TOKENIZER).exists():
        raise SystemExit(
            f"transformers' {kind} cannot be saved in a form that the tokenizers library reads"
        )
