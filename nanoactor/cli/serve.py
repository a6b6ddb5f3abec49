"""`serve`: arguments to a server's configuration and its engine's."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
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
    engine = parser.add_argument_group("engine (nanoactor/config.py says what each is)")
    _add_fields(engine, EngineConfig, _NOT_HERE)
    server = parser.add_argument_group("server (nanoactor/server/config.py)")
    listed = ("api_keys", "allowed_hosts", "cors_origins")
    _add_fields(server, ServerConfig, listed)
    for name, text in (
        ("api-key", f"may be repeated; default: ${KEY_VARIABLE}"),
        ("allowed-host", "may be repeated"),
        ("cors-origin", "may be repeated; * is any"),
    ):
        server.add_argument(f"--{name}", action="append", metavar="TEXT", help=text)


def _add_fields(group: Any, config: type[Any], left_out: tuple[str, ...]) -> None:
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in left_out:
            continue
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):  # optional
            (kind,) = (part for part in kind.__args__ if part is not types.NoneType)
        known = {"default": field.default, "help": f"default: {field.default}"}
        if typing.get_origin(kind) is typing.Literal:
            known |= {"choices": typing.get_args(kind)}
        elif kind is bool:
            known |= {"action": argparse.BooleanOptionalAction}
        else:
            known |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(f"--{field.name.replace('_', '-')}", **known)


def _values(args: Any, config: type[Any]) -> dict[str, Any]:
    """Of the arguments, those that are its fields."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(args).items() if name in names}


async def run_server(args: Any) -> None:
    """Serve until a signal."""
    from nanoactor.server.run import serve

    for name in ("nanoactor.server", "nanoactor.access"):
        logging.getLogger(name).setLevel(logging.INFO)
    from_environment = [key for key in (os.environ.get(KEY_VARIABLE),) if key]
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
