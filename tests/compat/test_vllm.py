"""`nanoactor.compat.vllm` in the place of `vllm`: what programs import, check, call and read."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import typing

import pytest

from nanoactor.compat import vllm as shim
from nanoactor.errors import InvalidConfig, InvalidRequest, NanoactorError
from nanoactor.model_files.files import resolve_model

FAST = dict(model="demo", device="simulated:0.5", placement="single", max_model_len=64)


@pytest.fixture
def installed():
    shim.install()
    yield importlib.import_module("vllm")
    shim.uninstall()
    assert importlib.util.find_spec("vllm") is None


def test_programs_find_a_package_with_a_version(installed):
    assert importlib.util.find_spec("vllm").name == "vllm"
    assert importlib.metadata.version("vllm") == installed.__version__ == shim.VERSION
    assert importlib.metadata.distribution("vllm").metadata["Name"] == "vllm"
    assert importlib.metadata.packages_distributions()["vllm"] == ["vllm"]
    assert "vllm" in {one.metadata["Name"] for one in importlib.metadata.distributions()}
    shim.install()  # a second time changes nothing
    assert importlib.import_module("vllm") is installed


@pytest.mark.parametrize("name", sorted(shim._MODULES))
def test_every_module_is_imported(installed, name):
    path = f"vllm.{name}" if name else "vllm"
    module = importlib.import_module(path)
    assert module.__name__ == path
    assert vars(module).keys() >= shim._MODULES[name].keys()
    with pytest.raises(
        AttributeError, match=f"nanoactor.compat.vllm does not provide {path}.nothing"
    ):
        module.nothing  # noqa: B018


def test_what_is_absent_says_so(installed):
    with pytest.raises(ModuleNotFoundError, match="nanoactor.compat.vllm does not provide it"):
        importlib.import_module("vllm.engine.arg_utils")
    with pytest.raises(ImportError):
        exec("from vllm import EngineArgs")
    lora = importlib.import_module("vllm.lora.request")
    with pytest.raises(
        NotImplementedError, match="LoRARequest is not available in nanoactor: LoRA adapters"
    ):
        lora.LoRARequest("a", 1, "/x")
    network = importlib.import_module("vllm.utils.network_utils")
    with pytest.raises(NanoactorError, match="get_ip is not available in nanoactor"):
        network.get_ip()


def test_annotations_of_parameters_are_whole(installed):
    """LangChain's wrapper passes on none but these."""
    known = typing.get_type_hints(installed.SamplingParams)
    assert {"temperature", "max_tokens", "stop", "logprobs", "top_k"} <= known.keys()
    assert known.keys() == installed.SamplingParams.__annotations__.keys()


def test_an_engine_answers_as_vllms_does(installed):
    prompts = [installed.TokensPrompt(prompt_token_ids=[5, 6, 7]) for _ in range(2)]
    scored = installed.SamplingParams(
        temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False
    )
    written = installed.SamplingParams(
        max_tokens=512,
        stop=["\n\n"],
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    # As lm-eval makes it.
    options = dict(
        revision=None,
        dtype="auto",
        tokenizer=None,
        tokenizer_mode="auto",
        tokenizer_revision=None,
        trust_remote_code=False,
        tensor_parallel_size=1,
        max_num_seqs=None,
        quantization=None,
        seed=1234,
        enable_lora=False,
        max_lora_rank=16,
    )
    with installed.LLM(**{**FAST, **options}) as llm:
        assert llm.llm_engine.model_config.max_model_len == 64
        outputs = llm.generate(
            prompts, sampling_params=[scored, scored], use_tqdm=False, lora_request=None
        )
        told = outputs[0].prompt_logprobs
        assert told[0] is None
        assert {6} <= told[1].keys()
        assert len(told) == 3
        (output,) = llm.generate("ROMEO:", written, use_tqdm=False)
        assert isinstance(output, installed.RequestOutput)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) <= 64, "capped"
        (answer,) = llm.chat([{"role": "user", "content": "Hi"}], written, use_tqdm=False)
        assert answer.outputs[0].token_ids
        assert llm.reset_prefix_cache() is True
        with pytest.raises(NotImplementedError, match="lora_request is not supported"):
            llm.generate("a", written, lora_request="x")
        with pytest.raises(AttributeError, match="LLM has no attribute 'sleep'"):
            llm.sleep()
    with pytest.raises(InvalidConfig, match="enable_sleep_mode"):
        installed.LLM(**FAST, enable_sleep_mode=True)
    with pytest.raises(InvalidRequest):
        installed.SamplingParams(temperature=-1)


def test_tokenizers_and_templates_are_those_of_transformers(installed):
    tokenizers = importlib.import_module("vllm.tokenizers")
    hf = importlib.import_module("vllm.renderers.hf")
    place = resolve_model("demo")
    tokenizer = tokenizers.get_tokenizer(
        str(place), tokenizer_mode="auto", trust_remote_code=False, revision=None
    )
    assert tokenizer.decode(tokenizer("ROMEO:")["input_ids"]) == "ROMEO:"
    found = hf.resolve_chat_template(
        tokenizer=tokenizer, chat_template=None, tools=None, model_config=None
    )
    assert found == tokenizer.chat_template
    assert hf.resolve_chat_template(tokenizer, "{{ x }}") == "{{ x }}"
    with pytest.raises(NotImplementedError, match="tokenizer_mode"):
        tokenizers.get_tokenizer(str(place), tokenizer_mode="mistral")


def test_the_real_package_is_not_replaced_behind_its_back(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ImportError, match="already been imported"):
        shim.install()


def test_a_module_runs_as_a_program(tmp_path):
    (tmp_path / "made_for_vllm.py").write_text(
        "import sys, vllm\nfrom vllm import SamplingParams\n"
        "print(vllm.__version__, SamplingParams().max_tokens, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "nanoactor.compat.vllm"]
    done = subprocess.run(
        [*command, "made_for_vllm", "a", "b"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == f"{shim.VERSION} 16 ['a', 'b']\n", done.stderr
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: python -m nanoactor.compat.vllm MODULE" in done.stderr
