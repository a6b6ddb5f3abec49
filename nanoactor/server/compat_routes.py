"""Routes of vLLM's server that health probes, routers and other programs expect."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

import nanoactor
from nanoactor.api.engine import AsyncLLM
from nanoactor.models.config import read_json
from nanoactor.server.completions import Completions
from nanoactor.server.context import json_response
from nanoactor.server.errors import APIError, invalid
from nanoactor.server.http import HttpFrontend, Routes
from nanoactor.server.live_answers import LiveAnswers
from nanoactor.server.serving import Engine
from nanoactor.text.template_files import TOKENIZER_CONFIG, read_template_files

_FILE_MEMBERS = (
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "special_tokens_map_file",
    "name_or_path",
)
"""Fields of a tokenizer's configuration that contain file names and are not returned."""


class CompatRoutes:
    """Handlers of `/version`, `/load`, `/docs`, `/ping` and `/invocations`, and of the optional
    routes: `/tokenizer_info`, and those that control the engine."""

    def __init__(
        self,
        llm: Engine,
        completions: Completions,
        answers: LiveAnswers,
        http: HttpFrontend,
        names: Sequence[str],
    ) -> None:
        """Store the services. `names` are the names that clients may use for the model."""
        self._llm, self._completions, self._answers = llm, completions, answers
        self._http, self._names = http, names

    def routes(self, document: Mapping[str, Any], health: Any) -> Routes:
        """Return the routes that are always served. `health` is the handler of `/health`, and
        `document` is the OpenAPI document."""
        return {
            "/version": ("GET", self.version),
            "/load": ("GET", self.load),
            "/docs": ("GET", _docs_page(document)),
            "/ping": ("GET, POST", health),
            "/invocations": ("POST", self.invocations),
        }

    def tokenizer_routes(self) -> Routes:
        """Return the optional route that exposes the tokenizer's configuration."""
        return {"/tokenizer_info": ("GET", self.tokenizer_info)}

    def control_routes(self) -> Routes:
        """Return the optional routes that control the engine or expose its configuration."""
        return {
            "/server_info": ("GET", self.server_info),
            "/get_world_size": ("GET", self.world_size),
            "/reset_prefix_cache": ("POST", self.reset_prefix_cache),
            "/pause": ("POST", self.pause),
            "/resume": ("POST", self.resume),
            "/is_paused": ("GET", self.is_paused),
        }

    async def version(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /version`: return the version of nanoactor."""
        return json_response({"version": nanoactor.__version__})

    async def load(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /load`: return the number of answers in progress."""
        return json_response({"server_load": self._answers.num_live})

    async def invocations(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /invocations`: run a chat if the body has `messages`, or a text completion
        if it has `prompt`."""
        body = await self._http.body(request)
        try:
            decoded = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            decoded = None
        if not isinstance(decoded, dict) or ("messages" in decoded) == ("prompt" in decoded):
            raise invalid(
                "the body must be a JSON object with either messages (for a chat) or "
                "prompt (for a completion)"
            )
        handler = self._completions.chat if "messages" in decoded else self._completions.completions
        return await handler(request)

    async def tokenizer_info(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /tokenizer_info`: return the tokenizer's configuration and the chat
        template in use."""
        files = self._llm.files
        if files.tokenizer_directory is None:
            raise APIError(404, "the engine has no tokenizer because skip_tokenizer_init is set")
        path = files.tokenizer_directory / TOKENIZER_CONFIG
        info = read_json(path) if path.exists() else {}
        template_files = read_template_files(files.tokenizer_directory, files.chat_template)
        info = {
            name: _token_text(value) for name, value in info.items() if name not in _FILE_MEMBERS
        }
        info |= dict(template_files.special_tokens)
        info["tokenizer_class"] = str(info.get("tokenizer_class") or "PreTrainedTokenizerFast")
        if template_files.sources:
            info["chat_template"] = template_files.sources.get("default", "")
        return json_response(info)

    # -- control --------------------------------------------------------------------------

    def _require_single_engine(self) -> AsyncLLM:
        if not isinstance(self._llm, AsyncLLM):
            raise APIError(404, "this path controls a single engine, but this server runs several")
        return self._llm

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /server_info`: return the engine's options, under the names that vLLM
        uses."""
        config_format = request.query.get("config_format", "text")
        if config_format not in ("text", "json"):
            raise invalid("config_format must be text or json", "config_format")
        config, facts = self._llm.config, self._llm.facts
        info = {
            "model_config": {
                "model": config.model,
                "served_model_name": self._names[0],
                "dtype": f"torch.{facts['dtype']}",
                "max_model_len": self._llm.files.max_model_len,
                "max_logprobs": config.max_logprobs,
                "logprobs_mode": "raw_logprobs",
                "seed": config.seed,
            },
            "cache_config": {
                "block_size": facts["block_size"],
                "num_gpu_blocks": facts["num_blocks"],
                "enable_prefix_caching": config.enable_prefix_caching,
            },
            "parallel_config": {"tensor_parallel_size": config.tensor_parallel_size},
            "scheduler_config": {
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
            },
            "device_config": {"device": facts["device"]},
            "weight_transfer_config": None,
        }
        config_value = info if config_format == "json" else str(info)
        return json_response({"vllm_config": config_value, "version": nanoactor.__version__})

    async def world_size(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /get_world_size`: return the number of tensor-parallel ranks."""
        return json_response({"world_size": self._llm.config.tensor_parallel_size})

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /reset_prefix_cache`: invalidate the prefix cache."""
        return json_response({"success": await self._require_single_engine().reset_prefix_cache()})

    async def pause(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /pause?mode=keep`: make all requests wait until `/resume`."""
        mode = request.query.get("mode", "")
        if mode != "keep":
            raise invalid(
                f"mode must be keep, got {mode[:100]!r}; a pause makes requests wait and never "
                "aborts them",
                "mode",
            )
        await self._require_single_engine().pause_generation()
        return json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """Handle `POST /resume`: resume generation after a pause."""
        await self._require_single_engine().resume_generation()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.StreamResponse:
        """Handle `GET /is_paused`: return whether generation is paused."""
        return json_response({"is_paused": await self._require_single_engine().is_paused()})


def _token_text(value: Any) -> Any:
    """Return the text of a special token that is a JSON object. Return any other value
    unchanged."""
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _docs_page(document: Mapping[str, Any]) -> Callable[[web.Request], Any]:
    """Return the handler of a page that lists all routes. The page loads no external resources."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation['summary'])}</td></tr>"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>nanoactor</title>'
        "<h1>nanoactor</h1><p>All fields of all routes are in "
        '<a href="openapi.json">openapi.json</a>.</p>'
        f"<table><tr><th>Method</th><th>Path</th><th></th></tr>{rows}</table></html>"
    )
    policy = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"}

    async def docs(request: web.Request) -> web.StreamResponse:
        return web.Response(text=page, content_type="text/html", headers=policy)

    return docs
