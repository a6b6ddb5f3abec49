"""Ray Data: rows in, answers out, in order and each once, whoever dies."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from nanoactor import EngineConfig, InvalidConfig, InvalidRequest, SamplingParams
from nanoactor.ray_data import Columns, Generate, generate, plain, row_seeds
from tests.ray_serve.requests import IMAGE

pytestmark = [pytest.mark.deadly, pytest.mark.timeout(600)]
OPTIONS = dict(
    device="cpu",
    dtype="float32",
    threads=1,
    num_kv_blocks=256,
    max_num_seqs=16,
    max_model_len=1024,
)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture
def local(monkeypatch):
    """A Ray in this process's session."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def of_engine(config, rows, params, columns):
    made = Generate(config, params, columns)
    try:
        return made(rows)
    finally:
        made._run(made._llm.close())


def test_every_form_of_a_row():
    messages = [{"role": "user", "content": "Speak"}]
    prompts = np.empty(5, object)
    prompts[:] = ["To be", np.array(messages, object), np.array([50, 51, 52]), "", "Two"]
    rows = {
        "prompt": prompts,
        "number": np.arange(5, dtype=np.int64),
        "schema": np.array(["", "", "", "", SCHEMA], object),
    }
    columns = Columns(seed="number", json_schema="schema", token_ids="ids")
    params = SamplingParams(max_tokens=40, ignore_eos=False)
    found = of_engine(EngineConfig("demo", **OPTIONS), rows, params, columns)
    assert list(found["number"]) == list(range(5))
    assert [bool(error) for error in found["error"]] == [False] * 3 + [True, False]
    assert "InvalidRequest: the prompt is empty" in found["error"][3]
    assert found["finish_reason"][3] == ""
    assert all(1 <= len(found["ids"][at]) <= 40 for at in (0, 1, 2, 4))
    if found["finish_reason"][4] == "stop":
        assert "a" in json.loads(found["generated_text"][4])


def test_images():
    prompts = np.empty(1, object)
    prompts[:] = ["<|vision_start|><|image_pad|><|vision_end|>read: "]
    images = np.empty(1, object)
    images[:] = [[IMAGE.read_bytes()]]
    params = SamplingParams(max_tokens=4, temperature=0)
    rows = {"prompt": prompts, "seen": images}
    found = of_engine(EngineConfig("demo-vl", **OPTIONS), rows, params, Columns(images="seen"))
    assert found["error"] == [""]
    assert len(found["generated_text"][0]) > 0


def test_a_wrong_row_fails_the_job_where_that_is_wanted():
    made = Generate(EngineConfig("demo", **OPTIONS), on_error="raise")
    try:
        with pytest.raises(InvalidRequest):
            made({"prompt": np.array(["", "To be"], object)})
        with pytest.raises(InvalidConfig, match="no column 'prompt'"):
            made({"text": np.array(["To be"], object)})
    finally:
        made._run(made._llm.close())


def test_names_and_values():
    with pytest.raises(InvalidConfig, match="different names"):
        Columns(prompt="text", text="text")
    with pytest.raises(InvalidConfig):
        Columns(prompt="")
    given = np.array([{"role": "user", "content": "x", "name": None}], object)
    assert plain(given) == [{"role": "user", "content": "x"}]
    assert plain(np.int64(3)) == 3
    assert len(set(row_seeds(1, 0, 50))) == 50
    assert row_seeds(1, 10, 2) == row_seeds(1, 0, 12)[10:]


@pytest.mark.parametrize(
    "changes",
    [
        dict(retries=-1),
        dict(retries=True),
        dict(on_error="Raise"),
        dict(engines=0),
        dict(engines="2"),
        dict(batch_size=0),
    ],
    ids=str,
)
def test_invalid_options_are_refused_before_an_engine_starts(changes):
    (name,) = changes
    with pytest.raises(InvalidConfig, match=f"^{name} must be"):
        generate(None, "demo", **changes)
    if name in ("retries", "on_error"):
        with pytest.raises(InvalidConfig, match=f"^{name} must be"):
            Generate(EngineConfig("demo"), **changes)


def _actors():
    found = []
    for pid in os.listdir("/proc"):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::MapWorker"):
            found.append(int(pid))
    return found


@pytest.mark.long
def test_an_actor_dies_and_no_row_is_lost_or_there_twice(local):
    count = 300
    rows = [
        {"row": at, "prompt": f"ROMEO: {at}", "seed": seed}
        for at, seed in enumerate(row_seeds(7, 0, count))
    ]
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def answered():
        dataset = local.data.from_items(rows, override_num_blocks=12)
        columns = Columns(seed="seed")
        made = generate(
            dataset, "demo", params, engines=2, columns=columns, batch_size=16, **OPTIONS
        )
        return made.iter_rows()

    wanted, found = [*answered()], []
    for row in answered():
        if not found:  # the first of twelve blocks is done
            os.kill(_actors()[0], signal.SIGKILL)
        found.append(row)
    assert [row["row"] for row in found] == list(range(count))
    assert found == wanted
    assert not any(row["error"] for row in found)
