"""Typed answers by what programs are written with, each as its documentation does it."""

import asyncio
import gc
import importlib
import json
import typing
import warnings

import openai
import pydantic
import pytest

from nanoactor.compat import vllm as shim
from nanoactor.text.tokenizer import load_tokenizer
from tests.server.harness import CPU, served
from tests.server.scripted import SPACES, directory, with_weights
from tests.text.test_chat import DEMO

pytestmark = pytest.mark.long

ASK = "Which sword or crown is it?"
# The model has never seen JSON, and would fill it with white space.
BODY = {
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 300,
    "seed": 1,
    "logit_bias": dict.fromkeys(map(str, SPACES), -100),
}


class Item(pydantic.BaseModel, extra="forbid"):
    """A thing of value."""

    kind: typing.Literal["sword", "crown"]
    worth: typing.Literal[1, 2, 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The URL of a server of the demo model with a template for tools and thoughts."""
    path = with_weights(directory(tmp_path_factory.mktemp("model")))
    with served("--served-model-name", "m", *CPU, model=str(path)) as server:
        yield f"{server.url}/v1"


@pytest.fixture(autouse=True)
def collected():
    """What a client leaves open is closed here, and not by whatever test comes next."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def client(name):
    """A client's module; those of the optional extra `clients` may not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        pytest.skip(f"{name} is not installed: see docs/server.md")


@pytest.mark.filterwarnings("ignore:`langchain-community` is being sunset:DeprecationWarning")
def test_langchains_wrapper_of_vllm():
    """Which imports `vllm`, and finds `nanoactor.compat.vllm`."""
    wrapper = client("langchain_community.llms").VLLM
    shim.install()
    try:
        options = dict(device="simulated:0.5", placement="single", max_model_len=256)
        llm = wrapper(model="demo", max_new_tokens=512, temperature=0.0, vllm_kwargs=options)
        with llm.client:
            assert "\n\n" not in llm.invoke("ROMEO:", stop=["\n\n"])
            several = llm.generate(["ROMEO:", "KING:"], logprobs=2).generations
            assert all(one[0].text for one in several)
    finally:
        shim.uninstall()


@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(base, method, strict):
    model = client("langchain_openai").ChatOpenAI(
        model="m", base_url=base, api_key="none", max_retries=0, extra_body=BODY
    )
    found = model.with_structured_output(Item, method=method, strict=strict).invoke(ASK)
    assert isinstance(found, Item)


def test_langchain_in_json_mode(base):
    """It is any object: an empty one where the model is made to prefer that."""
    (brace,) = load_tokenizer(DEMO).encode("}", add_special_tokens=False).ids
    model = client("langchain_openai").ChatOpenAI(
        model="m",
        base_url=base,
        api_key="none",
        max_retries=0,
        extra_body={**BODY, "logit_bias": {str(brace): 100}},
    )
    asked = model.with_structured_output(Item, method="json_mode", include_raw=True)
    assert json.loads(asked.invoke(ASK)["raw"].content) == {}


def test_instructor_as_it_is(base):
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as inner:
        made = client("instructor").from_openai(inner)
        found = made.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": ASK}],
            response_model=Item,
            max_retries=0,
            extra_body=BODY,
        )
    assert isinstance(found, Item)


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents_with_a_type_of_output(base, model):
    """The second is its default."""
    agents = client("agents")
    agents.set_tracing_disabled(True)
    body = without_limit() if model == "OpenAIResponsesModel" else BODY

    async def main():
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as inner:
            agent = agents.Agent(
                name="a",
                output_type=Item,
                model=getattr(agents, model)("m", inner),
                model_settings=agents.ModelSettings(extra_body=body),
            )
            return (await agents.Runner.run(agent, ASK)).final_output

    assert isinstance(asyncio.run(main()), Item)


def test_pydantic_ai_as_it_is(base):
    made = client("pydantic_ai")
    models, providers = client("pydantic_ai.models.openai"), client("pydantic_ai.providers.openai")

    async def main():
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as inner:
            provider = providers.OpenAIProvider(openai_client=inner)
            agent = made.Agent(
                models.OpenAIChatModel("m", provider=provider),
                output_type=Item,
                model_settings={"extra_body": BODY},
            )
            return (await agent.run(ASK)).output

    assert isinstance(asyncio.run(main()), Item)


def test_llama_index_with_a_structured_model(base):
    """Its releases need openai before 3, so that it is not part of the extra."""
    made = client("llama_index.llms.openai_like").OpenAILike(
        model="m",
        api_base=base,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        additional_kwargs={"extra_body": BODY},
    )
    message = client("llama_index.core.llms").ChatMessage(role="user", content=ASK)
    found = made.as_structured_llm(Item).chat([message])
    assert isinstance(found.raw, Item)


# -- the other two APIs --------------------------------------------------------------------


def without_version(base):
    """The URL for packages that add the version themselves."""
    return base.removesuffix("/v1")


def without_limit():
    """The body for the Responses API, whose name of the limit is another."""
    values = {name: value for name, value in BODY.items() if name != "max_tokens"}
    return {**values, "max_output_tokens": BODY["max_tokens"]}


def test_langchain_over_responses(base):
    model = client("langchain_openai").ChatOpenAI(
        model="m",
        base_url=base,
        api_key="none",
        max_retries=0,
        use_responses_api=True,
        extra_body=without_limit(),
    )
    found = model.with_structured_output(Item, method="json_schema").invoke(ASK)
    assert isinstance(found, Item)
    assert "".join(str(chunk.text) for chunk in model.stream(ASK))


def test_langchain_over_messages(base):
    model = client("langchain_anthropic").ChatAnthropic(
        model="m", base_url=without_version(base), api_key="none", max_retries=0, max_tokens=20
    )
    answer = model.invoke(ASK)
    assert answer.usage_metadata["output_tokens"] > 0
    bound = model.bind_tools([Item], tool_choice="any").invoke(ASK, max_tokens=300)
    assert [call["name"] for call in bound.tool_calls] in (["Item"], [])


def test_pydantic_ai_by_the_names_of_its_models(base, monkeypatch):
    """`openai:m` means the Responses API."""
    made = client("pydantic_ai")
    monkeypatch.setenv("OPENAI_BASE_URL", base)
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    async def main():
        settings = {"extra_body": without_limit()}
        agent = made.Agent(
            "openai-responses:m", output_type=made.NativeOutput(Item), model_settings=settings
        )
        return (await agent.run(ASK)).output

    assert isinstance(asyncio.run(main()), Item)
