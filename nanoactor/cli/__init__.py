"""The command line: `nanoactor generate | chat | serve | doctor`."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import io
import logging
import os
import re
import sys
from typing import Any

import nanoactor
from nanoactor.cli.options import add_options
from nanoactor.cli.serve import KEY_VARIABLE, VLLM_KEY_VARIABLE, run_on_uvloop, run_server
from nanoactor.cli.stream import ONE_USER, chat, generate
from nanoactor.compat.flags import NOTES, CommandLine, add_flags, normalize_arguments
from nanoactor.doctor import Machine, examine
from nanoactor.doctor.finding import as_json, as_text
from nanoactor.errors import NanoactorError
from nanoactor.models.errors import ModelError
from nanoactor.options.config import EngineConfig
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.requests.named_parameters import suggestion
from nanoactor.requests.params import SamplingParams
from nanoactor.runtime.errors import RuntimeFault
from nanoactor.server.config import ServerConfig


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. After an error, print a one-line message and exit with status 1. Exit
    with status 2 for invalid arguments."""
    _use_utf8()
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    level = {0: logging.WARNING, 1: logging.INFO}.get(args.verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if args.command is not run_server:  # the server logs its notes itself
        for note in getattr(args, NOTES, ()):
            print(f"nanoactor: {note}", file=sys.stderr)
    try:
        args.run(args.command(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except (NanoactorError, ModelError, RuntimeFault) as error:
        print(f"nanoactor: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of the output has exited
        sys.stderr.close()
        sys.exit(1)


def _use_utf8() -> None:
    """Use UTF-8 for the standard streams even if the locale (such as POSIX) supports only ASCII."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name == "ascii":
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def _decode_as_utf8(argument: str) -> str:
    """Decode an argument as UTF-8 after Python has decoded it as ASCII. Return it unchanged if it
    is not valid UTF-8."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(argument).decode()
    return argument


_MODEL_HELP = "a directory, a name on the Hugging Face hub, `demo` or `demo-vl`"


def _hints(unknown: list[str], options: list[str]) -> str:
    """Return hints that suggest a known option for each unknown one, to append to an error message.
    Empty if no option is similar."""
    flags = (name.partition("=")[0] for name in unknown if name.startswith("-"))
    return "".join(f"; {name}{hint}" for name in flags if (hint := suggestion(name, options)))


def _parse(arguments: list[str]) -> Any:
    """Parse the command line. The model and the prompt may appear anywhere among the options."""
    parser, commands = _parser()
    command, options = arguments[:1], [_decode_as_utf8(argument) for argument in arguments[1:]]
    command_parser = commands.get(command[0]) if command else None
    if command_parser is None or command_parser.get_default("command") is _doctor:
        return parser.parse_args([*command, *options])
    dests = {
        flag: action.dest for action in command_parser._actions for flag in action.option_strings
    }
    try:
        command_line = normalize_arguments(options, dests)
    except NanoactorError as error:
        command_parser.error(str(error))
    args, rest = parser.parse_known_args([*command, *command_line.options])
    if unknown_flags := [one for one in rest if one.startswith("-")]:
        known = re.findall(r"--[a-z][\w-]*", command_parser.format_usage())
        command_parser.error(
            f"unrecognized arguments: {' '.join(rest)}{_hints(unknown_flags, known)}"
        )
    positionals = [one for one in (args.model, getattr(args, "prompt", None)) if one is not None]
    _assign_positionals(command_parser, args, [*positionals, *rest], command_line)
    return args


def _assign_positionals(
    command_parser: argparse.ArgumentParser,
    args: Any,
    positionals: list[str],
    command_line: CommandLine,
) -> None:
    """Assign the positional arguments to the model and the prompt. Exit with an error if there are
    too many, if the model is missing or if its position is ambiguous."""
    takes_prompt = hasattr(args, "prompt")
    max_positionals = 1 + takes_prompt
    if command_line.model is not None and len(positionals) == max_positionals:
        command_parser.error(f"the model is given twice: {command_line.model} and {positionals[0]}")
    if len(positionals) > max_positionals:
        command_parser.error(f"unrecognized arguments: {' '.join(positionals[max_positionals:])}")
    if (
        command_line.config_file_model is not None
        and takes_prompt
        and len(positionals) == 1
        and command_line.model is None
    ):
        command_parser.error(
            f"{positionals[0]!r} could be either a model or a prompt, because the "
            "configuration file also names a model; give both on the command line, or remove "
            "the model from the file"
        )
    model = command_line.model
    if model is None and positionals:
        model, *positionals = positionals
    args.model = model or command_line.config_file_model
    if takes_prompt:
        args.prompt = positionals[0] if positionals else None
    if args.model is None:
        command_parser.error("the following arguments are required: model")


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Create the main parser. Return it with the parsers of the commands, by command name."""
    parser = argparse.ArgumentParser(
        prog="nanoactor", description="An LLM inference engine made of actors."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # If an option exists for both engine and request (--seed), the request's, added last, is used.
    generate_parser = commands.add_parser(
        "generate",
        help="complete a prompt and stream the output to the terminal",
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    chat_parser = commands.add_parser(
        "chat",
        help="chat with a model; Ctrl-D ends the conversation",
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    serve_parser = commands.add_parser(
        "serve",
        help="start an HTTP server that is compatible with the OpenAI API",
        allow_abbrev=False,
        epilog="Without --api-key, the API key is taken from the environment variable "
        f"${KEY_VARIABLE} or ${VLLM_KEY_VARIABLE}, if one of them is set.",
    )
    doctor_parser = commands.add_parser("doctor", help="diagnose this machine and suggest fixes")
    for command in (generate_parser, chat_parser, serve_parser):
        command.add_argument("model", nargs="?", help=_MODEL_HELP)
    generate_parser.add_argument(
        "prompt", nargs="?", help="the prompt to complete; default: standard input"
    )
    generate_parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="answer each line of this file ('-' for standard input) and print one JSON object per "
        "line, in order. A line is a JSON string, or an object with `prompt`, "
        "`prompt_token_ids` or `messages`, and optionally `id` and sampling parameters",
    )
    chat_parser.add_argument("--system", help="a system message at the start of the conversation")
    fields: dict[argparse.ArgumentParser, dict[str, Any]] = {}
    for command in (generate_parser, chat_parser):
        sampling = command.add_argument_group(
            "sampling (default: as recommended by the model's files)"
        )
        engine = command.add_argument_group("engine")
        fields[command] = add_options(engine, EngineConfig, **ONE_USER)
        add_options(sampling, SamplingParams)
        command.add_argument(
            "--trace",
            metavar="FILE",
            help="write a timeline of all actors to this file, for ui.perfetto.dev",
        )
        command.add_argument(
            "--json", action="store_true", help="print a JSON object for each piece of output"
        )
        command.add_argument(
            "--image",
            metavar="FILE",
            action="append",
            default=[],
            help="an image to put at the start of the prompt, for vision models. May be repeated.",
        )
    fields[serve_parser] = add_options(serve_parser.add_argument_group("engine"), EngineConfig)
    fields[serve_parser] |= add_options(serve_parser.add_argument_group("server"), ServerConfig)
    add_options(serve_parser.add_argument_group("several engines on Ray"), FleetConfig)
    for command, settings in fields.items():
        command.add_argument(
            "--config",
            metavar="FILE",
            help="a YAML file that maps option names to values; the command line takes precedence",
        )
        add_flags(command, settings, has_server_options=command is serve_parser)
    doctor_parser.add_argument(
        "--json", action="store_true", help="print the findings as one JSON object"
    )
    for command in (parser, generate_parser, chat_parser, serve_parser, doctor_parser):
        command.add_argument("--version", action="version", version=nanoactor.__version__)
    for command, function, run in (
        (generate_parser, generate, asyncio.run),
        (chat_parser, chat, asyncio.run),
        (serve_parser, run_server, run_on_uvloop),
        (doctor_parser, _doctor, sys.exit),
    ):
        command.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=0,
            help="write a log; -vv writes a more detailed one",
        )
        command.set_defaults(parser=command, command=function, run=run)
    return parser, {
        "generate": generate_parser,
        "chat": chat_parser,
        "serve": serve_parser,
        "doctor": doctor_parser,
    }


def _doctor(args: Any) -> int:
    """Print the findings. Return the exit status: 1 if a finding is bad, and 0 otherwise."""
    findings = examine(Machine())
    print(as_json(findings) if args.json else as_text(findings), flush=True)
    return int(any(finding.state == "bad" for finding in findings))
