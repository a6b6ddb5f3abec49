"""Support for the flags of vLLM's and SGLang's servers, and for configuration files like theirs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoactor.errors import InvalidConfig
from nanoactor.requests.known_names import ENGINE, SERVER, Name

NOTES = "notes"
"""Name of the attribute of the parsed arguments that lists a note for each flag without effect."""
_MODEL = ("--model", "--model-path")
_IN_JSON = ("--allowed-origins",)
"""Flags whose lists are given as JSON."""


def add_flags(
    parser: argparse.ArgumentParser, fields: Mapping[str, Mapping[str, Any]], *, serves: bool
) -> None:
    """Add other engines' flags to a command, without help texts. `fields` maps each field that has
    an option to that option's argparse settings, including `dest`; `serves` is True if the command
    also has the server's options."""
    parser.set_defaults(**{NOTES: []})
    taken = set(parser._option_string_actions)
    for name in (*ENGINE, *(SERVER if serves else ())):
        flags = [flag for flag in name.flags if flag not in taken and flag not in _MODEL]
        if not flags:
            continue
        if name.ours in fields:
            flags += [f"--no-{flag[2:]}" for flag in flags] if name.inverts else []
            parser.add_argument(*flags, **_alias(name, fields[name.ours]))
        elif not name.ours:
            if name.takes == "flag":
                flags += [f"--no-{flag[2:]}" for flag in flags if flag.startswith("--")]
            nargs = {"flag": 0, "value": None, "list": "+"}[name.takes]
            parser.add_argument(
                *flags,
                action=_Foreign,
                name=name,
                nargs=nargs,
                dest=NOTES,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


def _alias(name: Name, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argparse settings for an alias of an option."""
    made = {**known, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if name.inverts:
        return {**made, "action": _Inverted, "nargs": 0}
    if name.flags[0] in _IN_JSON:  # the alias takes a JSON list; our flag is repeated instead
        return {**made, "action": "store", "type": _json_list}
    return made


def _json_list(text: str) -> list[str]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return found


class _Inverted(argparse.Action):
    """Turns one of our options off, or on if the flag is given as `--no-...`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the option."""
        setattr(namespace, self.dest, (option_string or "").startswith("--no-"))


class _Foreign(argparse.Action):
    """Accepts a flag with a value that has no effect here, and rejects it with any other value."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, name: Name, **known: Any):
        super().__init__(option_strings, dest, **known)
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
        value = not flag.startswith("--no-") if name.takes == "flag" else _value(values)
        if not name.allows(value):
            complaint = name.complaint(value).removeprefix(name.theirs)
            parser.error(f"{flag}{complaint}")
        getattr(namespace, NOTES).append(f"{flag} has no effect: {name.note}")


def _value(given: Any) -> Any:
    """Parse a command-line value as JSON; return the text itself if it is not JSON."""
    if isinstance(given, list):
        return [_value(one) for one in given]
    if given.lower() == "none":
        return None
    try:
        return json.loads(given)
    except ValueError:
        return given


@dataclasses.dataclass(frozen=True)
class Line:
    """A command's arguments, spelled as our parser expects them."""

    options: list[str]
    """Options of the configuration file, then those of the command line."""
    model: str | None = None
    """Value of the flag that names the model, if it is given."""
    model_of_file: str | None = None


def canonical(arguments: Sequence[str], dests: Mapping[str, str]) -> Line:
    """Convert a command's arguments for our parser: write flag names with hyphens, extract a model
    that a flag names, and insert the options of a configuration file. `dests` maps each flag to the
    option that it sets. Raises `InvalidConfig` if the file is invalid, or if a flag for the model
    or the file is given twice or without a value."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    spelled, behind = [_hyphens(one, dests) for one in arguments[:at]], [*arguments[at:]]
    models, rest = _taken(spelled, _MODEL)
    files, rest = _taken(rest, ("--config",))
    if len(files) > 1 or len(models) > 1:
        raise InvalidConfig(f"{'--config' if len(files) > 1 else '--model'} is given twice")
    model = models[0] if models else None
    if not files:
        return Line([*rest, *behind], model)
    given = {dests[name] for one in rest if (name := one.partition("=")[0]) in dests}
    options = _read_file(Path(files[0]))
    of_file = options.pop("model", options.pop("model-path", None))
    if of_file is not None and not isinstance(of_file, str):
        raise InvalidConfig(f"--config {files[0]}: model must be a string, got {of_file!r:.100}")
    written = [
        argument
        for name, value in options.items()
        if dests.get(f"--{name}") not in given
        for argument in _written(f"--{name}", value)
    ]
    return Line([*written, *rest, *behind], model, of_file)


def _hyphens(argument: str, dests: Mapping[str, str]) -> str:
    """Return a known flag with hyphens instead of underscores, anything else unchanged."""
    name, equals, value = argument.partition("=")
    known = name.replace("_", "-")
    is_flag = name.startswith("--") and (known in dests or known in (*_MODEL, "--config"))
    return known + equals + value if is_flag else argument


def _taken(arguments: list[str], flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of these flags, and the other arguments."""
    values, rest = [], []
    following = iter(arguments)
    for argument in following:
        name, equals, given = argument.partition("=")
        if name not in flags:
            rest.append(argument)
            continue
        value = given if equals else next(following, None)
        if value is None:
            raise InvalidConfig(f"{name} requires a value")
        values.append(value)
    return values, rest


def _read_file(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file, by name; the names have hyphens, not underscores."""
    import yaml  # imported here, as few commands use a configuration file

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"--config {path}: {error.strerror}") from None
    except (UnicodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise InvalidConfig(f"--config {path} is not valid YAML: {text}") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InvalidConfig(f"--config {path} must contain options by name, such as 'port: 8001'")
    found = {name.strip("-").replace("_", "-"): value for name, value in options.items()}
    if "config" in found:
        raise InvalidConfig(f"--config {path} must not itself contain the option config")
    return found


def _written(flag: str, value: Any) -> Iterable[str]:
    """Return the command-line arguments for an option of a configuration file."""
    if value is None:
        return ()
    if isinstance(value, bool):
        return (flag,) if value else (f"--no-{flag[2:]}",)
    if isinstance(value, list) and flag not in _IN_JSON:
        return (f"{flag}={one}" for one in value)
    return (f"{flag}={json.dumps(value) if isinstance(value, dict | list) else value}",)
