"""Fingerprint of a replica. Replicas with equal fingerprints can resume each other's sequences."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanoactor
from nanoactor.fleet.wire import VERSION
from nanoactor.model_files.files import ModelFiles
from nanoactor.options.config import EngineConfig

log = logging.getLogger("nanoactor.fleet")

_CHUNK_BYTES = 4 << 20
_THREADS = 4
_OUTPUT_OPTIONS = (
    "dtype",
    "generation_config",
    "load_format",
    "max_logprobs",
    "max_model_len",
    "skip_tokenizer_init",
    "tensor_parallel_size",
)
"""Options that change the output, if only by rounding."""


def fingerprint(files: ModelFiles, config: EngineConfig) -> str:
    """Return a digest, in hex, of everything that affects the output: the model's files, the
    options, the version and the kind of device. Every file is read, which takes about as long as
    loading the model."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{VERSION} {nanoactor.__version__} {device_kind(config.device)}".encode())
    for name in _OUTPUT_OPTIONS:
        digest.update(f" {name}={getattr(config, name)}".encode())
    digest.update(f" {files.generation} {files.eos_token_ids}".encode())
    paths = sorted(files.fingerprints, key=lambda path: path.name)
    with ThreadPoolExecutor(_THREADS) as pool:
        for path, file_digest in zip(paths, pool.map(_digest, paths), strict=True):
            digest.update(path.name.encode() + file_digest)
    return digest.hexdigest()


def device_kind(device: str) -> str:
    """Return the part of a device name before the colon, such as "cuda" for "cuda:1". The rest, a
    device number or a simulated device's step times, does not affect the output."""
    return device.partition(":")[0]


def _digest(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()
