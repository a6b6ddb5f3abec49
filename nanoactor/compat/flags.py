"""Flags of vLLM's and SGLang's servers on our command line, and configuration files as theirs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoactor.compat.names import ENGINE, SERVER, Name
from nanoactor.errors import InvalidConfig

NOTES = "notes"
"""The attribute of parsed arguments that has a line for each flag that changes nothing."""
_MODEL = ("--model", "--model-path")


def add_flags(
    parser: argparse.ArgumentParser, fields: Mapping[str, Mapping[str, Any]], *, serves: bool
) -> None:
    """Have a command take other engines' flags, which its help does not show.

    `fields` has, by the name of each field that is an option already, its destination (`dest`) and
    what argparse knows of it; `serves`: the command has options of the server, too.
    """
    parser.set_defaults(**{NOTES: []})
    taken = set(parser._option_string_actions)
    for name in (*ENGINE, *(SERVER if serves else ())):
        flags = [flag for flag in name.flags if flag not in taken and flag not in _MODEL]
        if not flags:
            continue
        if name.ours in fields:
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
    """Return what argparse has to know of another name of an option."""
    made = {**known, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if name.inverts:
        return {**made, "action": "store_false"}
    if name.theirs == "allowed_origins":  # a list in JSON, where ours is repeated
        return {**made, "action": "store", "type": _json_list}
    return made


def _json_list(text: str) -> list[str]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON list of texts")
    return found


class _Foreign(argparse.Action):
    """Takes a flag that changes nothing, and refuses one that would have to."""

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
        """Write down why the flag changes nothing, or end with what is wrong."""
        name, flag = self._name, option_string or ""
        value = not flag.startswith("--no-") if name.takes == "flag" else _value(values)
        if not name.allows(value):
            complaint = name.complaint(value).removeprefix(name.theirs)
            parser.error(f"{flag}{complaint}")
        getattr(namespace, NOTES).append(f"{flag} changes nothing: {name.note}")


def _value(given: Any) -> Any:
    """Return what a text on a command line stands for: JSON, or itself."""
    if isinstance(given, list):
        return [_value(one) for one in given]
    if given.lower() == "none":
        return None
    try:
        return json.loads(given)
    except ValueError:
        return given


def canonical(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the configuration file that is named, and the arguments: with hyphens in the names of
    their flags, the model first where a flag or the file names it, and the file's before those of
    the line. Raises `InvalidConfig` for a file that is none."""
    spelled = [_hyphens(argument) for argument in arguments]
    model, rest = _taken(spelled, _MODEL)
    file, rest = _taken(rest, ("--config",))
    if file is not None:
        of_file = [*_of_file(Path(file), {one.partition("=")[0] for one in rest})]
        model_of_file, of_file = _taken(of_file, _MODEL)
        model, rest = model or model_of_file, [*of_file, *rest]
    return file, rest if model is None else [model, *rest]


def names_model(arguments: Sequence[str]) -> bool:
    """Tell whether a flag among these names the model."""
    return any(_hyphens(one).partition("=")[0] in _MODEL for one in arguments)


def _hyphens(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _taken(arguments: list[str], flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of the last of these flags, and the other arguments."""
    value, rest = None, []
    following = iter(arguments)
    for argument in following:
        name, equals, given = argument.partition("=")
        if name not in flags:
            rest.append(argument)
        elif equals:
            value = given
        else:
            value = next(following, None)
            if value is None:
                raise InvalidConfig(f"{name} needs a value")
    return value, rest


def _of_file(path: Path, given: set[str]) -> Iterator[str]:
    """Yield the options of a file as arguments, without those that the line gives."""
    import yaml  # few commands have such a file

    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"--config {path}: {error.strerror}") from None
    except (UnicodeError, yaml.YAMLError) as error:
        raise InvalidConfig(
            f"--config {path}: this is no YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise InvalidConfig(f"--config {path}: options by name are needed, such as 'port: 8001'")
    for name, value in options.items():
        flag = f"--{name.strip('-').replace('_', '-')}"
        if flag not in given:
            yield from _written(flag, value)


def _written(flag: str, value: Any) -> Iterable[str]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (flag,) if value else (f"--no-{flag[2:]}",)
    if isinstance(value, list):
        return (f"{flag}={one}" for one in value)
    return (f"{flag}={json.dumps(value) if isinstance(value, dict) else value}",)
