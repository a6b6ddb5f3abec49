"""Support for the command-line flags of vLLM's and SGLang's servers, and for their configuration
files."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoactor.errors import InvalidConfig
from nanoactor.requests.known_names import ENGINE, SERVER, ForeignOption

NOTES = "notes"
"""Attribute of the parsed arguments that contains a list of notes, one for each flag without
effect."""
_MODEL_FLAGS = ("--model", "--model-path")
_JSON_LIST_FLAGS = ("--allowed-origins",)
"""Flags whose value is a JSON list."""


def add_flags(
    parser: argparse.ArgumentParser,
    fields: Mapping[str, Mapping[str, Any]],
    *,
    has_server_options: bool,
) -> None:
    """Add the flags of other engines to a command's parser, hidden from its help.

    `fields` maps the name of each configuration field to the argparse settings of its option,
    including `dest`. `has_server_options` is True if the command also has options of the server.
    """
    parser.set_defaults(**{NOTES: []})
    existing = set(parser._option_string_actions)
    for name in (*ENGINE, *(SERVER if has_server_options else ())):
        flags = [flag for flag in name.flags if flag not in existing and flag not in _MODEL_FLAGS]
        if not flags:
            continue
        if name.ours in fields:
            flags += [f"--no-{flag[2:]}" for flag in flags] if name.inverts else []
            parser.add_argument(*flags, **_alias_settings(name, fields[name.ours]))
        elif not name.ours:
            if name.takes == "flag":
                flags += [f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")]
            nargs = {"flag": 0, "value": None, "list": "+"}[name.takes]
            parser.add_argument(
                *flags,
                action=_NoEffectAction,
                name=name,
                nargs=nargs,
                dest=NOTES,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _alias_settings(name: ForeignOption, option_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `add_argument` settings for another engine's flag that is an alias for one of
    our options."""
    settings = {**option_settings, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if name.inverts:
        return {**settings, "action": _InvertedAction, "nargs": 0}
    if name.flags[0] in _JSON_LIST_FLAGS:  # unlike our flag, which is repeated
        return {**settings, "action": "store", "type": _json_list}
    return settings


def _json_list(text: str) -> list[str]:
    values = json.loads(text)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return values


class _InvertedAction(argparse.Action):
    """Action of another engine's flag that sets our option to False. The flag's `--no-` form sets
    it to True."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the option to False, or to True if the flag has the prefix `--no-`."""
        setattr(namespace, self.dest, (option_string or "").startswith("--no-"))


class _NoEffectAction(argparse.Action):
    """Action of another engine's flag that has no effect here. It records a note, or exits with an
    error if the value is not supported."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, name: ForeignOption, **settings: Any
    ):
        super().__init__(option_strings, dest, **settings)
        self._name = name

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Record why the flag has no effect, or exit with an error."""
        name, flag = self._name, option_string or ""
        value = not flag.startswith("--no-") if name.takes == "flag" else _parse_value(values)
        if not name.allows(value):
            complaint = name.error_message(value).removeprefix(name.theirs)
            parser.error(f"{flag}{complaint}")
        getattr(namespace, NOTES).append(f"{flag} has no effect: {name.note}")


def _parse_value(raw: Any) -> Any:
    """Parse a value as JSON, and "none" as None. Return any other text unchanged."""
    if isinstance(raw, list):
        return [_parse_value(one) for one in raw]
    if raw.lower() == "none":
        return None
    try:
        return json.loads(raw)
    except ValueError:
        return raw


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Arguments of a command, in the form that our parser accepts."""

    options: list[str]
    """Options of the configuration file, followed by those of the command line."""
    model: str | None = None
    """Model that a flag names; None if there is no such flag."""
    config_file_model: str | None = None


def normalize_arguments(arguments: Sequence[str], dests: Mapping[str, str]) -> CommandLine:
    """Convert the arguments of a command for our parser.

    Flags get hyphens instead of underscores, the model named by a flag is extracted, and the
    options of a configuration file are inserted. `dests` maps each flag to the `dest` of its
    option. Raises `InvalidConfig` if the file is invalid, or if a flag for the model or the file is
    repeated or has no value.
    """
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    normalized, after_separator = (
        [_with_hyphens(one, dests) for one in arguments[:separator]],
        [*arguments[separator:]],
    )
    models, rest = _extract_flags(normalized, _MODEL_FLAGS)
    files, rest = _extract_flags(rest, ("--config",))
    if len(files) > 1 or len(models) > 1:
        raise InvalidConfig(f"{'--config' if len(files) > 1 else '--model'} is given twice")
    model = models[0] if models else None
    if not files:
        return CommandLine([*rest, *after_separator], model)
    given_dests = {dests[name] for one in rest if (name := one.partition("=")[0]) in dests}
    options = _read_file(Path(files[0]))
    config_file_model = options.pop("model", options.pop("model-path", None))
    if config_file_model is not None and not isinstance(config_file_model, str):
        raise InvalidConfig(
            f"--config {files[0]}: model must be a string, got {config_file_model!r:.100}"
        )
    file_arguments = [
        argument
        for name, value in options.items()
        if dests.get(f"--{name}") not in given_dests
        for argument in _as_arguments(f"--{name}", value)
    ]
    return CommandLine([*file_arguments, *rest, *after_separator], model, config_file_model)


def _with_hyphens(argument: str, dests: Mapping[str, str]) -> str:
    """Replace underscores in a known flag with hyphens. Return any other argument unchanged."""
    name, equals, value = argument.partition("=")
    hyphenated = name.replace("_", "-")
    is_flag = name.startswith("--") and (
        hyphenated in dests or hyphenated in (*_MODEL_FLAGS, "--config")
    )
    return hyphenated + equals + value if is_flag else argument


def _extract_flags(arguments: list[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of these flags, and the remaining arguments. Raises `InvalidConfig` if a
    flag has no value."""
    values, rest = [], []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, inline_value = argument.partition("=")
        if name not in flags:
            rest.append(argument)
            continue
        value = inline_value if equals else next(remaining, None)
        if value is None:
            raise InvalidConfig(f"{name} requires a value")
        values.append(value)
    return values, rest


def _read_file(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file by name, with hyphens instead of underscores. Raises
    `InvalidConfig` if the file is not readable or invalid."""
    import yaml  # imported here, as few commands use a configuration file

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"--config {path} cannot be read: {error.strerror}") from None
    except (UnicodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise InvalidConfig(f"--config {path} is not valid YAML: {text}") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InvalidConfig(f"--config {path} must map option names to values, as in 'port: 8001'")
    normalized = {name.strip("-").replace("_", "-"): value for name, value in options.items()}
    if "config" in normalized:
        raise InvalidConfig(f"--config {path} must not contain the option config itself")
    return normalized


def _as_arguments(flag: str, value: Any) -> Iterable[str]:
    """Convert an option of a configuration file to command-line arguments."""
    if value is None:
        return ()
    if isinstance(value, bool):
        return (flag,) if value else (f"--no-{flag[2:]}",)
    if isinstance(value, list) and flag not in _JSON_LIST_FLAGS:
        return (f"{flag}={one}" for one in value)
    return (f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}",)
