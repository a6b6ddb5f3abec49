"""Text generation for the rows of a Ray dataset, with engines in a pool of actors.

    import ray
    from nanoactor.ray_data import generate

    rows = generate(ray.data.read_parquet("prompts.parquet"), "demo", engines=2)

Needs the extra `nanoactor[ray-data]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from nanoactor.api.engine import AsyncLLM
from nanoactor.errors import (
    ComputationFailed,
    EngineClosed,
    EngineDead,
    EngineOverloaded,
    InvalidConfig,
    InvalidRequest,
    NanoactorError,
    OutOfResources,
    PoisonRequest,
)
from nanoactor.options.config import EngineConfig
from nanoactor.options.engine_options import engine_config
from nanoactor.requests.outputs import RequestOutput, RequestOutputKind
from nanoactor.requests.params import SamplingParams, derived_seed
from nanoactor.runtime.concurrency import run_all

log = logging.getLogger("nanoactor.ray")

T = TypeVar("T")
_RETRIED = (OutOfResources, ComputationFailed)
_AHEAD = 2
"""Maximum number of rows in flight per engine, as a multiple of `max_num_seqs`."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of the dataset columns from which prompts and options are read, and of the columns to
    which results are written."""

    prompt: str = "prompt"
    """Column of prompts. Each is a string, a list of chat messages, or a list of token ids."""
    images: str | None = None
    """Column with a list of images per row, as bytes or paths, for vision models. The prompt must
    then be a string or token ids with a placeholder for each image, not chat messages, which
    contain their own images."""
    json_schema: str | None = None
    """Column with a JSON schema, as text, that constrains the row's output. Rows with an empty
    value are unconstrained."""
    seed: str | None = None
    """Column with the row's integer seed."""
    text: str = "generated_text"
    token_ids: str | None = None
    """Column for the ids of the output tokens; None to omit it."""
    finish_reason: str = "finish_reason"
    error: str = "error"
    """Column for the error message of a failed row. Empty for rows that succeeded."""

    def __post_init__(self) -> None:
        """Raise `InvalidConfig` for invalid or duplicate names."""
        names = [getattr(self, field.name) for field in dataclasses.fields(self)]
        given = [name for name in names if name is not None]
        if not all(isinstance(name, str) and name for name in given):
            raise InvalidConfig(f"columns must have non-empty strings as names, got {given!r:.200}")
        if len(set(given)) < len(given):
            raise InvalidConfig(f"columns must have different names, got {given!r:.200}")


class Generate:
    """A callable for `Dataset.map_batches` that runs one engine. Ray creates one in each actor of a
    pool.

    Pass `batch_format="numpy"` to `map_batches`. Batches are processed one at a time, with at most
    twice `max_num_seqs` rows of the batch in flight.

    Transient errors are retried up to `retries` times. If a row still fails, its `error` column
    contains the reason, and other rows are unaffected. With `on_error="raise"`, the job fails
    instead.
    """

    def __init__(
        self,
        config: EngineConfig,
        params: SamplingParams | None = None,
        columns: Columns | None = None,
        *,
        retries: int = 2,
        on_error: Literal["column", "raise"] = "column",
    ) -> None:
        """Start the engine. Raises the errors of `AsyncLLM`, and `InvalidConfig` for an invalid
        `retries` or `on_error`."""
        _check_errors(retries, on_error)
        self._params = SamplingParams.for_model() if params is None else params
        self._columns, self._retries, self._raises = columns or Columns(), retries, on_error
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._llm: AsyncLLM = self._run(_started(config))
        self._room = asyncio.Semaphore(_AHEAD * config.max_num_seqs)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Generate an output for each row. Return the batch with the output columns added. Raises
        `InvalidConfig` if the batch has no prompt column."""
        names = self._columns
        if names.prompt not in batch:
            raise InvalidConfig(
                f"the batch has no column {names.prompt!r}; its columns are {sorted(batch)}"
            )
        count = len(batch[names.prompt])
        rows = [{name: plain(batch[name][at]) for name in batch} for at in range(count)]
        found = self._run(self._answers(rows))
        added: dict[str, list[Any]] = {names.text: [], names.finish_reason: [], names.error: []}
        if names.token_ids is not None:
            added[names.token_ids] = []
        for output, error in found:
            answer = None if output is None else output.outputs[0]
            added[names.text].append(answer.text if answer else "")
            added[names.finish_reason].append((answer.finish_reason or "") if answer else "")
            added[names.error].append(error)
            if names.token_ids is not None:
                added[names.token_ids].append(np.array(answer.token_ids if answer else [], int))
        return {**batch, **{name: _column(values) for name, values in added.items()}}

    async def _answers(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> list[tuple[RequestOutput | None, str]]:
        try:
            return await run_all([functools.partial(self._answer, row) for row in rows])
        except (EngineDead, EngineClosed):
            _leave_to_others()
            raise

    async def _answer(self, row: Mapping[str, Any]) -> tuple[RequestOutput | None, str]:
        """Return a row's output and an empty string, or None and the error message."""
        async with self._room:
            for attempt in range(self._retries + 1):
                try:
                    return await self._generate(row), ""
                except NanoactorError as error:
                    is_last = attempt == self._retries or not _may_go_well(error)
                    if is_last and (self._raises == "raise" or not _is_of_row(error)):
                        raise
                    if is_last:
                        return None, f"{type(error).__name__}: {error}"
        raise AssertionError("unreachable")

    async def _generate(self, row: Mapping[str, Any]) -> RequestOutput:
        prompt, params = self._prompt(row), self._params_of(row)
        while True:
            try:
                async for output in self._llm.generate(prompt, params):
                    final = output
                return final
            except EngineOverloaded:
                await self._llm.wait_for_capacity()

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        given = row[self._columns.prompt]
        images = row[self._columns.images] if self._columns.images is not None else None
        is_ids = isinstance(given, list) and all(isinstance(one, int) for one in given)
        if isinstance(given, list) and not is_ids:
            if images:
                raise InvalidRequest(
                    "the row's prompt is a conversation, so its images must be in the "
                    "messages, not in a separate column"
                )
            return given
        prompt = {"prompt_token_ids": given} if is_ids else {"prompt": given}
        return {**prompt, "multi_modal_data": {"image": images}} if images else prompt

    def _params_of(self, row: Mapping[str, Any]) -> SamplingParams:
        changes: dict[str, Any] = {"output_kind": RequestOutputKind.FINAL_ONLY}
        if self._columns.seed is not None:
            changes["seed"] = row[self._columns.seed]
        if self._columns.json_schema is not None and row[self._columns.json_schema]:
            changes["structured_outputs"] = {"json": row[self._columns.json_schema]}
        return dataclasses.replace(self._params, **changes)


async def _started(config: EngineConfig) -> AsyncLLM:
    return await AsyncLLM(config).start()


def _leave_to_others() -> None:
    """End this process if it is a Ray actor. Ray then restarts the actor and passes its batches to
    other actors, whereas an exception would fail the whole job."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        log.error("the engine has died, so this actor ends")
        os._exit(1)


def _may_go_well(error: NanoactorError) -> bool:
    return isinstance(error, _RETRIED) and not isinstance(error, PoisonRequest)


def _is_of_row(error: NanoactorError) -> bool:
    """Return True if the error concerns a single row, False if it concerns the whole engine."""
    return isinstance(error, InvalidRequest | OutOfResources | ComputationFailed)


def _check_errors(retries: Any, on_error: Any) -> None:
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise InvalidConfig(f"retries must be an integer of at least 0, got {retries!r:.100}")
    if on_error not in ("column", "raise"):
        raise InvalidConfig(f"on_error must be 'column' or 'raise', got {on_error!r:.100}")


def plain(value: Any) -> Any:
    """Convert a column's value to plain Python objects. Dict entries that are None are omitted,
    because columns of structs add them to chat messages for missing fields."""
    if isinstance(value, np.ndarray):
        return [plain(one) for one in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items() if one is not None}
    return value


def _column(values: list[Any]) -> Any:
    if values and isinstance(values[0], np.ndarray):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    return np.array(values, dtype=object)


def generate(
    rows: Any,
    model: str,
    params: SamplingParams | None = None,
    *,
    engines: int = 1,
    columns: Columns | None = None,
    batch_size: int = 64,
    retries: int = 2,
    on_error: Literal["column", "raise"] = "column",
    cpus: float = 1.0,
    **options: Any,
) -> Any:
    """Return a dataset with the output for each row of `rows`, in the same order.

    `rows` is a `ray.data.Dataset`. `engines` is the number of engines to start, each with `cpus`
    reserved CPUs and, if it runs on CUDA, its reserved GPUs. `options` are fields of
    `EngineConfig`. If an actor dies, it is replaced, and other actors process its batches. For
    reproducible output in that case, give each row a seed (`Columns.seed`). Raises `InvalidConfig`
    for invalid options or columns.
    """
    import ray

    _check_errors(retries, on_error)
    for name, count in (("engines", engines), ("batch_size", batch_size)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidConfig(f"{name} must be an integer of at least 1, got {count!r:.100}")
    config = engine_config(model, options)
    is_gpu = config.device.startswith("cuda") or (
        config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
    )
    if columns is not None and not isinstance(columns, Columns):
        raise InvalidConfig(f"columns must be a Columns object, got {columns!r:.100}")
    rows.context.execution_options.preserve_order = True
    return rows.map_batches(
        Generate,
        fn_constructor_args=(config, params, columns),
        fn_constructor_kwargs={"retries": retries, "on_error": on_error},
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=engines, max_tasks_in_flight_per_actor=2),
        num_cpus=cpus,
        num_gpus=config.tensor_parallel_size if is_gpu else 0,
    )


def row_seeds(seed: int, first: int, count: int) -> list[int]:
    """Derive one seed for each of `count` rows, numbered from `first`. A seed has 63 bits, so that
    it fits into an int64 column."""
    return [derived_seed(seed, first + at + 1) >> 1 for at in range(count)]
