"""`serve`: arguments to a server's configuration and its engine's; options from their fields."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import logging
import os
import textwrap
import types
import typing
from collections.abc import Coroutine
from typing import Any

from nanoactor.config import EngineConfig
from nanoactor.engine import AsyncLLM
from nanoactor.server.config import ServerConfig

KEY_VARIABLE = "NANOACTOR_API_KEY"
_NOT_HERE = ("model", "debug_delay_ms", "debug_record_dir")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Every field of `EngineConfig` and of `ServerConfig`, under its own name."""
    engine = parser.add_argument_group("engine")
    _add_fields(engine, EngineConfig, _NOT_HERE)
    server = parser.add_argument_group("server")
    listed = ("api_keys", "allowed_hosts", "cors_origins")
    _add_fields(server, ServerConfig, listed)
    said = descriptions(ServerConfig)
    for name, text in (
        ("api-key", f"{said.get('api_keys')} May be repeated; default: ${KEY_VARIABLE}"),
        ("allowed-host", f"{said.get('allowed_hosts')} May be repeated"),
        ("cors-origin", f"{said.get('cors_origins')} May be repeated"),
    ):
        server.add_argument(f"--{name}", action="append", metavar="TEXT", help=text)


def _add_fields(group: Any, config: type[Any], left_out: tuple[str, ...]) -> None:
    hints, said = typing.get_type_hints(config), descriptions(config)
    for field in dataclasses.fields(config):
        if field.name in left_out:
            continue
        kind, read = hints[field.name], None
        if isinstance(kind, types.UnionType):  # optional
            (kind,) = (part for part in kind.__args__ if part is not types.NoneType)
            read = functools.partial(_or_none, kind)
        text = said.get(field.name, "").replace("%", "%%")
        if "efault" not in text and field.default is not None:
            text += f" Default: {field.default}."
        known = {"default": field.default, "help": text}
        if typing.get_origin(kind) is typing.Literal:
            known |= {"choices": typing.get_args(kind)}
        elif kind is bool:
            known |= {"action": argparse.BooleanOptionalAction}
        else:
            known |= {"type": read or kind, "metavar": kind.__name__.upper()}
        group.add_argument(f"--{field.name.replace('_', '-')}", **known)


def _or_none(kind: Any, text: str) -> Any:
    """A value of an option that may be left open."""
    return None if text.lower() == "none" else kind(text)


def descriptions(config: type[Any]) -> dict[str, str]:
    """By field of a dataclass: the text that stands below it in its source, if that is there."""
    try:
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    except OSError:
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[field.target.id] = " ".join(text.value.split())
    return found


def _values(args: Any, config: type[Any]) -> dict[str, Any]:
    """Of the arguments, those that are its fields."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(args).items() if name in names}


async def run_server(args: Any) -> None:
    """Serve until a signal."""
    from nanoactor.server.run import serve

    for name in ("nanoactor.server", "nanoactor.access"):
        logging.getLogger(name).setLevel(logging.INFO)
    # Out of the environment: it is nothing to the processes that are started.
    from_environment = [key for key in (os.environ.pop(KEY_VARIABLE, None),) if key]
    config = ServerConfig(
        **_values(args, ServerConfig),
        api_keys=tuple(args.api_key or from_environment),
        allowed_hosts=tuple(args.allowed_host or ()),
        cors_origins=tuple(args.cors_origin or ()),
    )
    await serve(AsyncLLM(EngineConfig(**_values(args, EngineConfig))), config)


def run_on_uvloop(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`; a server has enough to do for a faster loop to show."""
    import uvloop

    uvloop.run(main)
