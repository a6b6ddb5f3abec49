"""What a user gives is checked at the door, by name, before anything starts."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
import threading
import typing

import huggingface_hub.constants
import numpy as np
import pytest

import nanoactor
from nanoactor import (
    AsyncLLM,
    EngineConfig,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from nanoactor.errors import InvalidConfig, InvalidRequest
from nanoactor.model_files.files import read_model_files, resolve_model
from nanoactor.models.errors import ModelError, UnsupportedModel
from tests.conftest import children, descriptors
from tests.text.tokenizers_for_tests import DEMO

NAN, INF = math.nan, math.inf


# -- SamplingParams ---------------------------------------------------------------------------

BAD_PARAMS = {
    "n": [0, -1, 129, 1.5, "1", True, None],
    "logprobs": [-1, 1.5, "1", True, 2**31, [1]],
    "prompt_logprobs": [-1, 1.5, "1", True, 2**31, [1]],
    "temperature": [NAN, INF, -INF, -0.1, 10001, 10**400, "1", True, [1.0]],
    "top_p": [NAN, INF, 0, 0.0, -0.5, 1.01, "0.9", True],
    "min_p": [NAN, -0.01, 1.01, "0", False],
    "presence_penalty": [NAN, -2.01, 2.01, "1", True],
    "frequency_penalty": [NAN, -2.01, 2.01, "1", True],
    "repetition_penalty": [NAN, INF, 0, -1.0, 101, "1", True],
    "logit_bias": [
        [(1, 1.0)],
        {-1: 1.0},
        {"a": 1.0},
        {"-1": 1.0},
        {"9" * 5000: 1.0},
        {1.5: 1.0},
        {True: 1.0},
        {1: 101},
        {1: NAN},
        {1: "1"},
        {1: None},
        dict.fromkeys(range(1025), 1.0),
    ],
    "allowed_token_ids": [[], 5, "12", [-1], [1.0], [True], [None], [2**31], [[1]], [1] * 1025],
    "bad_words": ["a", [""], [" "], [1], [None], b"ab", 5, ["a" * 257], ["a"] * 129, ["\ud800"]],
    "top_k": [-2, 1.0, NAN, "5", True, 2**31],
    "seed": [-2, 2**64, 0.5, "1", True],
    "max_tokens": [0, -1, 1.0, INF, "9", True, 2**64],
    "min_tokens": [-1, 1.0, None, "9", False, 2**64],
    "truncate_prompt_tokens": [0, -2, 1.0, NAN, "5", True, 2**31],
    "stop": [
        "",
        [""],
        ["a", ""],
        ["a", 1],
        [None],
        b"ab",
        5,
        0,
        ["a" * 1025],
        ["a"] * 65,
        "\ud800",
    ],
    "stop_token_ids": [5, 0, "12", [-1], [1.0], ["a"], [True], [None], [2**31], [[1]]],
    "ignore_eos": [None, 1, "yes"],
    "include_stop_str_in_output": [None, 0, "no"],
    "skip_special_tokens": [None, 1, []],
    "detokenize": [None, 0, "no"],
    "output_kind": [None, 1, "DELTA"],
    "structured_outputs": [5, "{}", [], True, {}, {"jsn": {}}, {"regex": "a", "choice": ["a"]}],
    "logits_processors": [[], [print], print, 0, 1],
    "best_of": [0, 2, 1.0, "1", True],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}={v!r:.12}") for n, values in BAD_PARAMS.items() for v in values],
)
def test_a_bad_sampling_parameter_is_named(name, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)


def test_every_sampling_parameter_is_checked():
    assert BAD_PARAMS.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequest, match=r"^stop .* detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_what_vllm_has_and_we_have_not_is_refused_with_the_reason():
    with pytest.raises(InvalidRequest, match=r"^logits_processors .* use logit_bias"):
        SamplingParams(logits_processors=[print])
    with pytest.raises(InvalidRequest, match=r"^best_of was removed .* request n answers"):
        SamplingParams(best_of=2)


def test_an_output_under_a_grammar_ends_where_that_does():
    with pytest.raises(InvalidRequest, match=r"^ignore_eos .* structured_outputs"):
        SamplingParams(ignore_eos=True, structured_outputs={"regex": "a"})


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(InvalidRequest, match=r"min_tokens \(3\) must not exceed max_tokens \(2\)"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize(
    "values",
    [
        dict(temperature=0, top_p=1, min_p=0, top_k=-1, seed=0, max_tokens=1, min_tokens=1),
        dict(temperature=1e4, top_p=1e-3, min_p=1.0, top_k=0, seed=2**64 - 1, min_tokens=0),
        dict(presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=0.01),
        dict(logit_bias={0: -100.0, 2**31 - 1: 100.0}, allowed_token_ids=(0, 2**31 - 1)),
        dict(bad_words=("a" * 256,) * 128),
        dict(truncate_prompt_tokens=-1),
        dict(truncate_prompt_tokens=2**31 - 1),
        dict(ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False),
        dict(output_kind=RequestOutputKind.DELTA, max_tokens=2**31 - 1, top_k=2**31 - 1),
        dict(detokenize=False, stop=(), stop_token_ids=(1,)),
        dict(logits_processors=None, best_of=None),
        dict(best_of=1),
        dict(structured_outputs=StructuredOutputsParams(json_object=True), ignore_eos=False),
    ],
)
def test_values_at_the_limits_are_kept(values):
    params = SamplingParams(**values)
    assert {name: getattr(params, name) for name in values} == values


def test_stops_are_brought_into_one_form():
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop="和\n").stop == SamplingParams(stop=["和\n"]).stop == ("和\n",)
    assert len(SamplingParams(stop=["x" * 1024] * 64).stop) == 64
    assert SamplingParams(stop=(s for s in "ab")).stop == ("a", "b")
    assert SamplingParams().stop_token_ids == ()
    assert SamplingParams(stop_token_ids=[0, 2**31 - 1]).stop_token_ids == (0, 2**31 - 1)
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}  # as JSON has them
    assert SamplingParams(allowed_token_ids=[5, 3, 5]).allowed_token_ids == (3, 5)


def test_sampling_parameters_are_frozen_and_hashable():
    stop = ["a"]
    params = SamplingParams(stop=stop, seed=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 2
    stop.append("b")
    assert params.stop == ("a",)
    assert len({params, SamplingParams(stop="a", seed=1), SamplingParams(seed=1)}) == 2
    assert dataclasses.replace(params, seed=3).stop == ("a",)


# -- EngineConfig -----------------------------------------------------------------------------

WHOLE = [0, -1, 1.0, "8", True, NAN]
FLAG = [None, 1, "no"]
SECONDS = [-1.0, NAN, "1"]
BAD_OPTIONS = {
    "otlp_traces_endpoint": ["", 5, "localhost:4317", "http://collector", "ftp://collector/v1"],
    "jump_forward": FLAG,
    "prefix_salt": [b"", bytes(15), bytes(65), "a salt that is text", 5],
    "tokenizer": ["", 5, True],
    "revision": ["", 5],
    "download_dir": ["", 5],
    "generation_config": ["", None, 5],
    "override_generation_config": ["", 5, []],
    "chat_template": ["", 5],
    "mask_timeout": SECONDS,
    "hold_timeout": SECONDS,
    "awake_ms": [-1, 1001, math.nan, "2", True],
    "max_logprobs": [0, -1, 1001, 1.5, "1", True, None],
    "model": ["", None, 5],
    "device": ["", None, 5],
    "load_format": ["random", None],
    "enforce_eager": FLAG,
    "decode_kernel": FLAG,
    "max_pipeline_depth": [*WHOLE, 1],
    "max_restarts": [-1, 1.0, "8", True, NAN, None],
    "restart_window": SECONDS,
    "dtype": ["int8", None, "fp16", 16],
    "max_model_len": [value for value in WHOLE if value != -1],
    "max_num_seqs": [*WHOLE, None],
    "max_num_batched_tokens": [*WHOLE, None],
    "block_size": WHOLE,
    "num_kv_blocks": WHOLE,
    "memory_utilization": [0, -0.5, 1.01, NAN, "0.5"],
    "enable_prefix_caching": FLAG,
    "encoder_cache_tokens": WHOLE,
    "num_vision_workers": [*WHOLE, None],
    "max_image_pixels": [*WHOLE, None],
    "limit_mm_per_prompt": [3, {"image": -1}, {"image": 1.5}, {"image": True}, {"audio": 1}],
    "pipeline_depth": [*WHOLE, None],
    "plan_lead": ["soon", None],
    "pooling": ["max", None, 5],
    "num_tokenizers": [*WHOLE, None],
    "priority_window": [*WHOLE, None],
    "tensor_parallel_size": [0, "1", None, 2.0],
    "threads": WHOLE,
    "seed": [1.5, "1", [1]],
    "skip_tokenizer_init": FLAG,
    "max_waiting_requests": [*WHOLE, None],
    "max_waiting_tokens": [*WHOLE, None],
    "max_waiting_media_bytes": [*WHOLE, None],
    "placement": ["everywhere", None, []],
    "transport": ["tcp", None],
    "check_weights": FLAG,
    "template_timeout": SECONDS,
    "stall_timeout": [0.5, -1, NAN, "1", True],
    "start_timeout": SECONDS,
    "stop_timeout": SECONDS,
    "debug": FLAG,
    "debug_delay_ms": SECONDS,
    "debug_record_dir": ["/no/such/directory", 5, ""],
    "graph_mode": ["graph", None, 1],
    "attention_layout": ["bsh", None],
    "weight_format": ["fractal", None],
    "graph_cache_dir": ["", 5],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(n, v, id=f"{n}={v!r}") for n, values in BAD_OPTIONS.items() for v in values],
)
def test_a_bad_engine_option_is_named(name, value):
    with pytest.raises(InvalidConfig, match=name):
        EngineConfig(**{"model": "demo", name: value})


@pytest.mark.parametrize(
    "options",
    [
        dict(graph_mode="npugraph"),
        dict(attention_layout="bnsd"),
        dict(weight_format="nz"),
        dict(graph_cache_dir="graphs"),
    ],
    ids=str,
)
def test_what_is_about_npus_alone_is_refused_elsewhere(options):
    EngineConfig("demo", device="npu", **options)
    EngineConfig("demo", device="auto", **options)
    for device in ("cpu", "cuda", "simulated:5"):
        with pytest.raises(InvalidConfig, match="is supported only on NPUs"):
            EngineConfig("demo", device=device, **options)


def test_graph_modes_and_enforce_eager_exclude_each_other():
    EngineConfig("demo", device="npu", graph_mode="eager", enforce_eager=True)
    EngineConfig("demo", device="cuda", graph_mode="eager")
    with pytest.raises(
        InvalidConfig, match="graph_mode 'npugraph' cannot be combined with enforce_eager"
    ):
        EngineConfig("demo", device="npu", graph_mode="npugraph", enforce_eager=True)


@pytest.mark.parametrize(
    ("device", "variable"),
    [("cuda:1", "CUDA_VISIBLE_DEVICES"), ("npu:1", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_ranks_need_a_device_each(device, variable):
    with pytest.raises(InvalidConfig, match=variable):
        EngineConfig("demo", device=device, tensor_parallel_size=2)


def test_numbers_of_numpys_are_numbers():
    options = EngineConfig(
        "demo",
        max_model_len=np.int64(64),
        max_num_seqs=np.int32(4),
        memory_utilization=np.float32(0.5),
        start_timeout=np.float64(3),
        seed=np.uint8(7),
    )
    assert (options.max_model_len, options.max_num_seqs, options.seed) == (64, 4, 7)
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        top_k=np.int64(3),
        max_tokens=np.int16(9),
        seed=np.uint64(2**64 - 1),
        stop_token_ids=np.array([3, 4]),
    )
    plain = SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, max_tokens=9, seed=2**64 - 1, stop_token_ids=[3, 4]
    )
    assert params == plain
    for made in (options, params):
        for field in dataclasses.fields(made):
            assert not type(getattr(made, field.name)).__module__.startswith("numpy"), field.name
    for wrong in (np.bool_(True), np.float64("nan"), np.int64(-5)):
        with pytest.raises(InvalidRequest):
            SamplingParams(temperature=wrong)
        with pytest.raises(InvalidConfig):
            EngineConfig("demo", threads=wrong)


HINTS = typing.get_type_hints(SamplingParams)
NUMBERS = [name for name, hint in HINTS.items() if {int, float} & {hint, *typing.get_args(hint)}]
FLAGS = [name for name, hint in HINTS.items() if hint is bool]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_request_may_be_numpys(name):
    parts = {HINTS[name], *typing.get_args(HINTS[name])}
    kinds = (np.float16, np.float32, np.float64) if float in parts else (np.int8, np.int64)
    for kind in (*kinds, np.uint64):
        given = kind(0.5) if issubclass(kind, np.floating) else kind(1)
        found = getattr(SamplingParams(**{name: given}), name)
        assert (type(found), found) == (type(given.item()), given)
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: np.bool_(True)})


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_of_a_request_may_be_numpys(name):
    for value in (True, False):
        assert getattr(SamplingParams(**{name: np.bool_(value)}), name) is value
    for wrong in (np.int64(1), np.float32(0), np.array([True])):
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: wrong})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_ids_in_lists_may_be_numpys(name):
    for given in ([np.int64(3), np.uint8(4)], np.array([3, 4], np.int32)):
        found = getattr(SamplingParams(**{name: given}), name)
        assert found == (3, 4)
        assert {type(token) for token in found} == {int}
    for wrong in (np.bool_(True), np.float32(1)):
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: [wrong]})


def test_biases_and_their_ids_may_be_numpys():
    given = {np.int64(3): np.float32(0.5), np.uint16(4): np.int8(-2)}
    found = SamplingParams(logit_bias=given).logit_bias
    assert found == {3: 0.5, 4: -2.0}
    assert {type(one) for item in found.items() for one in item} == {int, float}
    for wrong in ({np.bool_(True): 1.0}, {np.float32(1): 1.0}, {1: np.bool_(True)}):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            SamplingParams(logit_bias=wrong)


def test_every_engine_option_is_checked():
    assert BAD_OPTIONS.keys() == {field.name for field in dataclasses.fields(EngineConfig)}


def test_a_step_must_have_room_for_every_sequence():
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig("demo", max_num_batched_tokens=8, max_num_seqs=9)
    assert EngineConfig("demo", max_num_batched_tokens=9, max_num_seqs=9).max_num_seqs == 9


def test_an_engine_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig("demo").seed = 1


# -- AsyncLLM's construction ------------------------------------------------------------------


def test_an_unknown_option_is_named():
    with pytest.raises(InvalidConfig, match="unknown engine option.*nonsense"):
        AsyncLLM("demo", nonsense=1)


def test_a_bad_option_given_to_the_engine_is_not_called_unknown():
    for options in (dict(memory_utilization="0.5"), dict(max_num_seqs=0)):
        with pytest.raises(InvalidConfig) as caught:
            AsyncLLM("demo", **options)
        assert "unknown" not in str(caught.value)
        assert next(iter(options)) in str(caught.value)


def test_options_come_in_a_configuration_or_by_name():
    assert AsyncLLM(EngineConfig("demo", seed=3)).config == AsyncLLM("demo", seed=3).config
    with pytest.raises(InvalidConfig, match="not both"):
        AsyncLLM(EngineConfig("demo"), seed=3)


def test_construction_starts_no_process_and_no_thread():
    before = children(), threading.enumerate(), descriptors()
    engines = [AsyncLLM("demo", placement=p) for p in ("default", "split", "single")]
    assert (children(), threading.enumerate(), descriptors()) == before
    assert [engine.pids for engine in engines] == [{}, {}, {}]


# -- a model's files --------------------------------------------------------------------------


def model(path, **changes):
    """A copy of the demo model's JSON files, its config.json changed."""
    path.mkdir()
    for file in DEMO.glob("*.json"):
        shutil.copy(file, path)
    config = json.loads((DEMO / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    for name in (str(tmp_path / "none"), "./none", "~/none/such", "none", "a/b/c"):
        with pytest.raises(ModelError, match="none|a/b/c"):
            AsyncLLM(name)


def test_a_directory_without_configuration_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"empty; the directory of a model must contain config\.json"
    ) as caught:
        AsyncLLM(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(architectures=["GemmaForCausalLM"]), UnsupportedModel, "GemmaForCausalLM"),
        (dict(hidden_act="gelu"), UnsupportedModel, "hidden_act"),
        (dict(use_sliding_window=True), UnsupportedModel, "sliding"),
        (dict(quantization_config={"bits": 4}), UnsupportedModel, "quantization_config"),
        (dict(dtype="float8_e4m3fn"), UnsupportedModel, "float8_e4m3fn"),
        (dict(rope_parameters={"rope_type": "longrope"}), UnsupportedModel, "longrope"),
        (dict(hidden_size=None), ModelError, "hidden_size"),
        (dict(num_hidden_layers="6"), ModelError, "num_hidden_layers"),
        (dict(num_key_value_heads=3), ModelError, "heads"),
        (dict(head_dim=7), ModelError, "head_dim"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_served_is_refused_before_the_start(
    tmp_path, changes, error, words
):
    with pytest.raises(error, match=words):
        AsyncLLM(str(model(tmp_path / "m", **changes)))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_malformed_file_is_named(tmp_path, file):
    path = model(tmp_path / "m")
    for content in ("{", "[1]", "\x00"):
        (path / file).write_text(content)
        with pytest.raises(ModelError, match=file):
            AsyncLLM(str(path))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"temperature": -1.0},
        {"top_k": [1]},
        {"top_k": 2**40},
        {"eos_token_id": "</s>"},
    ],
    ids=str,
)
def test_a_bad_value_in_the_generation_configuration_is_the_models_fault(tmp_path, values):
    path = model(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=next(iter(values))):
        AsyncLLM(str(path))


def test_max_model_len_must_fit_the_model():
    assert AsyncLLM("demo", max_model_len=1024).files.max_model_len == 1024
    with pytest.raises(InvalidConfig, match="max_model_len 40961.*40960"):
        AsyncLLM("demo", max_model_len=40961)
    with pytest.raises(InvalidConfig, match="max_model_len must be at least 2"):
        AsyncLLM("demo", max_model_len=1)


def test_a_model_without_tokenizer_serves_token_ids_alone(tmp_path):
    path = model(tmp_path / "m")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="skip_tokenizer_init"):
        AsyncLLM(str(path))
    llm = AsyncLLM(str(path), skip_tokenizer_init=True)
    llm.generate({"prompt_token_ids": [1]})
    for prompt in ("text", [{"role": "user", "content": "x"}], {"prompt": "text"}):
        with pytest.raises(InvalidRequest, match="prompt_token_ids"):
            llm.generate(prompt)
    with pytest.raises(InvalidRequest, match="stop"):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(stop="x"))


def test_defaults_come_from_the_generation_configuration(tmp_path):
    path = model(tmp_path / "m")
    file = path / "generation_config.json"

    def read(values):
        file.write_text(json.dumps(values))
        return read_model_files(EngineConfig(str(path)))

    files = read({"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "eos_token_id": [4]})
    penalties = dict(presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1}
    assert files.generation.sampling == {**given, **penalties}
    assert (files.eos_token_ids, files.generation.not_applied) == ((4, 2), ())
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **penalties}
    assert read({}).generation.sampling == neutral
    assert read({"temperature": None, "top_k": None}).generation.sampling == neutral
    assert read({}).eos_token_ids == (2,)
    greedy = read({"do_sample": False, "temperature": 0.7, "top_k": 3}).generation.sampling
    assert greedy == {**neutral, "temperature": 0.0}
    assert read({"no_repeat_ngram_size": 3}).generation.not_applied == ("no_repeat_ngram_size",)
    repeats = read({"do_sample": False, "repetition_penalty": 1.1})
    assert repeats.generation.sampling == {**neutral, "temperature": 0.0, "repetition_penalty": 1.1}
    assert repeats.generation.not_applied == ()
    file.unlink()
    assert read_model_files(EngineConfig(str(path))).generation.sampling == neutral


# -- where a model is found -------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the Hugging Face hub; call it to add a model."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    def add(name, files=("config.json", "tokenizer.json", "model.safetensors")):
        commit = "0123456789abcdef0123456789abcdef01234567"
        folder = cache / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
        for file in files:
            shutil.copy(DEMO / file, snapshot)
        return snapshot

    return add


def test_a_name_on_the_hub_is_found_in_the_local_cache(hub):
    snapshot = hub("owner/tiny-qwen3")
    assert resolve_model("owner/tiny-qwen3").resolve() == snapshot.resolve()
    assert AsyncLLM("owner/tiny-qwen3").files.config.vocab_size == 2048


@pytest.mark.parametrize("name", ["owner/absent", "owner/not allowed!", "owner/..", "/x/y", "o//m"])
def test_a_name_that_is_not_in_the_cache_is_named(hub, name):
    hub("owner/present")
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert name in str(caught.value)


def test_a_cached_model_without_weights_is_not_taken_for_a_model(hub):
    hub("owner/half", files=("config.json", "tokenizer.json"))
    with pytest.raises(ModelError, match="owner/half"):
        resolve_model("owner/half")


def test_a_directory_goes_before_the_demo_and_the_hub(hub, tmp_path, monkeypatch):
    hub("owner/m")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("demo").samefile(DEMO)
    for name in ("demo", "owner/m"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
        assert resolve_model(name).samefile(tmp_path / name)


# -- prompts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    return AsyncLLM("demo", max_model_len=1024)


USER = {"role": "user", "content": "x"}
BAD_PROMPTS = {
    "empty_text": ("", "empty"),
    "empty_text_in_dict": ({"prompt": ""}, "empty"),
    "empty_list": ([], "empty"),
    "none": (None, "NoneType"),
    "number": (5, "int"),
    "bytes": (b"ab", "bytes"),
    "set": ({1, 2}, "set"),
    "ids_without_dict": ([1, 2, 3], "prompt_token_ids|role"),
    "text_in_dict_is_no_text": ({"prompt": 5}, "int"),
    "no_keys": ({}, "'prompt'"),
    "wrong_key": ({"text": "a"}, "text"),
    "two_keys": ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
    "keys_of_many_types": ({1: "a", "prompt": "b"}, "'prompt'"),
    "no_ids": ({"prompt_token_ids": []}, "empty"),
    "ids_none": ({"prompt_token_ids": None}, "prompt_token_ids"),
    "ids_text": ({"prompt_token_ids": "12"}, "prompt_token_ids"),
    "ids_number": ({"prompt_token_ids": 12}, "prompt_token_ids"),
    "ids_floats": ({"prompt_token_ids": [1.0, 2.0]}, "integers"),
    "ids_nan": ({"prompt_token_ids": [1, NAN]}, "integers"),
    "ids_bools": ({"prompt_token_ids": [True]}, "integers"),
    "ids_strings": ({"prompt_token_ids": ["1"]}, "integers"),
    "ids_with_none": ({"prompt_token_ids": [1, None]}, "integers"),
    "ids_nested": ({"prompt_token_ids": [[1, 2]]}, "flat list"),
    "ids_ragged": ({"prompt_token_ids": [[1], [2, 3]]}, "flat list"),
    "ids_empty_nested": ({"prompt_token_ids": [[]]}, "flat list"),
    "ids_dict": ({"prompt_token_ids": {1: 2}}, "flat list"),
    "ids_set": ({"prompt_token_ids": {1, 2}}, "flat list"),
    "ids_negative": ({"prompt_token_ids": [1, -1]}, "-1"),
    "ids_of_32_bits": ({"prompt_token_ids": [2**31]}, "2147483648"),
    "ids_of_64_bits": ({"prompt_token_ids": [2**63]}, str(2**63)),
    "ids_huge": ({"prompt_token_ids": [10**30]}, "prompt_token_ids"),
    "ids_mixed_huge": ({"prompt_token_ids": [-1, 2**63]}, "prompt_token_ids"),
    "surrogate": ("a\ud800", "Unicode"),
    "surrogate_in_message": ([{"role": "user", "content": "\udfff"}], "Unicode"),
    "surrogate_in_part": (
        [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
        "Unicode",
    ),
    "surrogate_in_role": ([{"role": "\udfff", "content": "x"}], "Unicode"),
    "strings": (["a", "b"], "role"),
    "message_without_role": ([USER, {"content": "x"}], "role"),
    "role_is_no_text": ([{"role": 1, "content": "x"}], "role"),
    "message_is_a_list": ([["user", "x"]], "role"),
    "long_text": ("x" * 65537, "bytes"),
    "long_in_bytes": ("和" * 21846, "65538 bytes"),
    "long_message": ([{"role": "user", "content": "x" * 65537}], "bytes"),
}


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_is_refused_at_once(llm, prompt, words):
    with pytest.raises(InvalidRequest, match=words):
        llm.generate(prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        "x" * 65536,
        {"prompt": "text"},
        {"prompt": [USER]},
        {"prompt_token_ids": [0, 2**31 - 1]},
        {"prompt_token_ids": (1, 2)},
        {"prompt_token_ids": np.array([1, 2], np.uint16)},
        [USER],
        (USER, {"role": "assistant", "content": None, "tool_calls": []}),
        [{"role": "user", "content": [{"type": "text", "text": "和"}]}],
    ],
    ids=lambda prompt: f"{prompt!r:.40}",
)
def test_a_good_prompt_waits_to_be_iterated(llm, prompt):
    llm.generate(prompt, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("prompt", ["text", {"prompt": "text"}, {"prompt_token_ids": [1]}])
def test_template_options_go_with_messages_alone(llm, prompt):
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        llm.generate(prompt, chat_template_kwargs={"enable_thinking": False})
    llm.generate([USER], chat_template_kwargs={"enable_thinking": False})
    llm.generate(prompt, chat_template_kwargs={})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(sampling_params={"temperature": 0}), "sampling_params"),
        (dict(sampling_params=SamplingParams(stop_token_ids=[2048])), "stop_token_ids.*2048"),
        (dict(priority=1.5), "priority"),
        (dict(priority=True), "priority"),
        (dict(priority=2**70), "priority"),
        (dict(chat_template_kwargs=["tools"]), "chat_template_kwargs"),
    ],
    ids=str,
)
def test_bad_arguments_beside_the_prompt_are_named_at_once(llm, arguments, words):
    with pytest.raises(InvalidRequest, match=words):
        llm.generate([USER], **arguments)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([{"role": "user", "content": object()}], {}),
        ([{**USER, "tool_calls": [{"arguments": "x" * 2**21}]}], {}),
        ([USER], {"tools": [print]}),
        ([USER], {"documents": ["x" * 2**21]}),
    ],
    ids=["object", "long_tool_calls", "function", "long_option"],
)
def test_a_conversation_that_cannot_travel_is_refused_at_once(llm, messages, options):
    with pytest.raises(InvalidRequest):
        llm.generate(messages, chat_template_kwargs=options)


# -- the package ------------------------------------------------------------------------------


def fresh(program):
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


IMPORT = """
import sys
before = len(sys.modules)
import nanoactor
print(len(sys.modules) - before)
heavy = {"torch", "transformers", "tokenizers", "aiohttp", "numpy", "jinja2", "huggingface_hub"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_importing_the_package_is_light():
    modules, heavy, *_ = fresh(IMPORT).split("\n")
    assert int(modules) < 100
    assert heavy == ""


def test_the_users_process_imports_neither_torch_nor_transformers():
    program = """
import sys
from nanoactor import LLM, AsyncLLM, SamplingParams
AsyncLLM("demo").generate("text", SamplingParams(stop="x"))
print(*sorted({"torch", "transformers", "aiohttp", "jinja2"} & set(sys.modules)))
"""
    assert fresh(program) == "\n"


def test_dir_lists_the_public_names():
    names = fresh("import nanoactor; print(*dir(nanoactor))").split()
    assert set(nanoactor.__all__) <= set(names)
    assert len(names) == len(set(names))
    for name in nanoactor.__all__:
        assert getattr(nanoactor, name).__name__ == name


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nanoactor' has no attribute 'Nonsense'"):
        nanoactor.Nonsense  # noqa: B018
    with pytest.raises(ImportError, match="Nonsense"):
        exec("from nanoactor import Nonsense")
