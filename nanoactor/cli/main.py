"""Arguments, and what they lead to."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import difflib
import io
import logging
import os
import sys
from typing import Any

import nanoactor
from nanoactor.cli.doctor import doctor
from nanoactor.cli.serve import add_server_options, run_on_uvloop, run_server
from nanoactor.cli.stream import chat, generate
from nanoactor.errors import NanoactorError
from nanoactor.models.errors import ModelError
from nanoactor.models.options import GRAPH_MODES
from nanoactor.runtime.errors import RuntimeFault


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with 1 and one line for an error, 2 for wrong arguments."""
    _speak_utf8()
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    level = {0: logging.WARNING, 1: logging.INFO}.get(args.verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        args.run(args.command(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except (NanoactorError, ModelError, RuntimeFault) as error:
        print(f"nanoactor: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        sys.exit(1)


def _speak_utf8() -> None:
    """Read and write UTF-8 where the locale (POSIX, say) knows nothing but ASCII."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def _as_utf8(argument: str) -> str:
    """An argument that was read as ASCII, read as UTF-8."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument


_OTHER_NAMES = {
    "--gpu-memory-utilization": "--memory-utilization",
    "--max-num-batched-token": "--max-num-batched-tokens",
    "--tp": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--context-length": "--max-model-len",
    "--num-gpu-blocks-override": "--num-kv-blocks",
    "--no-enable-chunked-prefill": "--max-num-batched-tokens",
}
"""What other engines call our options."""


def _hint(unknown: list[str], options: list[str]) -> str:
    """Which option was meant, perhaps."""
    hints = []
    for given in (name.partition("=")[0] for name in unknown if name.startswith("-")):
        near = difflib.get_close_matches(given, options, 1)
        meant = _OTHER_NAMES.get(given) or (near[0] if near else None)
        if meant in options:
            hints.append(f"{given}: do you mean {meant}?")
    return "".join(f"; {hint}" for hint in hints)


def _parse(arguments: list[str]) -> Any:
    """argparse takes an optional prompt only right behind the model; people also put it last."""
    parser = _parser()
    args, rest = parser.parse_known_args([_as_utf8(argument) for argument in arguments])
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(args, "prompt", "") is None:
        args.prompt = rest[0]
    elif rest:
        options = [f"--{name.replace('_', '-')}" for name in vars(args)]
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_hint(rest, options)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanoactor", description="An LLM inference engine made of actors."
    )
    parser.add_argument("--version", action="version", version=nanoactor.__version__)
    parser.set_defaults(run=asyncio.run)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("generate", help="continue a prompt, streamed to the terminal")
    one.add_argument("model", help="a directory, a name on the Hugging Face hub, or `demo`")
    one.add_argument("prompt", nargs="?", help="default: standard input")
    one.set_defaults(command=generate)
    talk = commands.add_parser("chat", help="talk with a model; end with Ctrl-D")
    talk.add_argument("model", help="a directory, a name on the Hugging Face hub, or `demo`")
    talk.add_argument("--system", help="a system message to begin with")
    talk.set_defaults(command=chat)
    for command in (one, talk):
        _add_sampling(command)
        _add_engine(command)
        _add_output(command)
    serve = commands.add_parser("serve", help="an HTTP server in the shapes of the OpenAI API")
    serve.add_argument("model", help="a directory, a name on the Hugging Face hub, or `demo`")
    serve.set_defaults(command=run_server, run=run_on_uvloop)
    add_server_options(serve)
    _add_verbose(serve)
    check = commands.add_parser("doctor", help="diagnose this machine and print fixes")
    check.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    check.set_defaults(command=doctor, run=sys.exit)
    _add_verbose(check)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling (default: what the model's files say)")
    for name, kind in (("temperature", float), ("top-p", float), ("min-p", float)):
        sampling.add_argument(f"--{name}", type=kind)
    for name in ("top-k", "seed", "max-tokens"):
        sampling.add_argument(f"--{name}", type=int)
    sampling.add_argument("--min-tokens", type=int, default=0)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, npu, cuda:N, npu:N, simulated:MS"
    )
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--num-kv-blocks", type=int)
    engine.add_argument("--pipeline-depth", type=int, default=2)
    engine.add_argument("--memory-utilization", type=float, help="for weights and cache, up to 1")
    engine.add_argument("--enforce-eager", action="store_true", help="capture no graphs")
    engine.add_argument("--graph-mode", default="auto", help=f"on an NPU: {', '.join(GRAPH_MODES)}")
    engine.add_argument("--attention-layout", default="tnd", help="on an NPU: tnd or bnsd")
    engine.add_argument("--weight-format", default="nd", help="on an NPU: nd or nz")
    engine.add_argument("--graph-cache-dir", help="on an NPU, for compiled graphs")
    engine.add_argument("--threads", type=int)
    engine.add_argument("--tensor-parallel-size", type=int, default=1)
    engine.add_argument("--placement", default="default", help="default, split or single")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="write a timeline of all actors, for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log; -vv logs more")
