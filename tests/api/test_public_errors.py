"""What leaves the public API is one of its own errors."""

import asyncio
import contextlib
import errno
import inspect
import os
import pickle

import pytest

import nanoactor
from nanoactor import LLM, AsyncLLM, BeamSearchParams, NanoactorError, SamplingParams, errors
from nanoactor.errors import InvalidRequest, OutOfResources, ProtocolBug, public, translated
from nanoactor.models import errors as models
from nanoactor.runtime import errors as runtime
from tests.text.test_patterns import tokenizer_directory

ODD = [
    None,
    5,
    -1,
    2.5,
    "b",
    b"bytes",
    "",
    [],
    {},
    [None],
    [5],
    [[]],
    {"prompt": 5},
    {"prompt_token_ids": "x"},
    [{"role": 5}],
    object(),
    print,
    SamplingParams,
    SamplingParams(),
    range(3),
    {1, 2},
    "\ud800",
    [{"role": "user", "content": object()}],
    {"prompt": "x", "multi_modal_data": 7},
]
NAMES = [f"{number}-{type(odd).__name__}" for number, odd in enumerate(ODD)]


def test_every_error_is_exported():
    kinds = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, NanoactorError)
    }
    assert kinds <= set(nanoactor.__all__)
    assert all(getattr(nanoactor, name) is getattr(errors, name) for name in kinds)


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", device="simulated:1", max_model_len=64) as llm:
        yield llm


@contextlib.contextmanager
def ours_alone():
    """Errors are ours, say something, and are no bugs."""
    found = []
    try:
        yield
    except NanoactorError as error:
        found.append(error)
    for error in found:
        assert str(error).strip()
        assert not isinstance(error, ProtocolBug), error


def ours(call, *args, **kwargs):
    """Call something that may refuse its arguments."""
    with ours_alone():
        call(*args, **kwargs)


@pytest.mark.parametrize("odd", ODD, ids=NAMES)
def test_whatever_is_given_the_error_is_ours(llm, odd):
    few = SamplingParams(max_tokens=1)
    ours(llm.generate, odd, few, use_tqdm=False)
    ours(llm.generate, "a", few if odd is None else odd, use_tqdm=False)
    ours(llm.chat, odd, few, use_tqdm=False)
    chat = [{"role": "user", "content": "a"}]
    for name in ("chat_template_kwargs", "tools", "add_generation_prompt"):
        ours(llm.chat, chat, few, use_tqdm=False, **{name: odd})
    ours(llm.generate_multimodal, odd, few, use_tqdm=False)
    ours(llm.beam_search, odd, BeamSearchParams(beam_width=1, max_tokens=1))
    ours(llm.beam_search, "a", odd)
    beams = BeamSearchParams(beam_width=1, max_tokens=1)
    ours(llm.beam_search, "a", beams, concurrency_limit=odd)
    assert len(llm.generate("fine", few, use_tqdm=False)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize("odd", ODD, ids=NAMES)
def test_whatever_is_given_to_the_asynchronous_engine_too(llm, odd):
    """On its loop, which is that of the blocking front."""
    engine, few = llm._llm, SamplingParams(max_tokens=1)

    async def main():
        for args, kwargs in [
            ((odd, few), {}),
            (("a", odd), {}),
            (("a", few), {"priority": odd}),
            (("a", few), {"chat_template_kwargs": odd}),
        ]:
            with ours_alone():
                async for _ in engine.generate(*args, **kwargs):
                    pass
            with ours_alone():
                for request in engine.submit(args[0] if kwargs else [args[0]], args[1], **kwargs):
                    request.close()
        with ours_alone():
            async for _ in engine.generate("a", few, request_id=odd):
                pass
        for call in (engine.abort, engine.trace):
            with ours_alone():
                await call(odd)
        for at in range(3):
            with ours_alone():
                await engine.activity(*(odd if place == at else 1 for place in range(3)))

    llm._call(main())


@pytest.mark.parametrize("call", [(), ("a", None, None, 1, 2), ("a", 1, 2, 3, 4, 5, 6)])
def test_a_call_that_fits_no_parameters_is_ours(llm, call):
    with pytest.raises(InvalidRequest, match="generate: "):
        llm.generate(*call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(5), "prompts must be a string, a dict, or a list of them, got 5"),
        (lambda llm: llm.generate("a", "b"), "sampling_params must be a SamplingParams object"),
        (lambda llm: llm.chat(5), "messages must be a list of messages"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], tools=5), "tools must be a list"),
    ],
)
def test_the_error_names_what_was_wrong(llm, call, words):
    with pytest.raises(InvalidRequest, match=words):
        call(llm)


def dangling(path):
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path / "nowhere")


def circular(path):
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path / "model.safetensors")


def deep(path):
    (path / "config.json").write_text('{"a":' * 100_000)


def pipe(path, name="config.json"):
    (path / name).unlink()
    os.mkfifo(path / name)


def device(path):
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/dev/zero")


def pipe_for_tokens(path):
    pipe(path, "tokenizer.json")


def pipe_for_weights(path):
    pipe(path, "model.safetensors")


def directory(path):
    (path / "generation_config.json").unlink()
    (path / "generation_config.json").mkdir()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dangling, "is a link to .*nowhere, which does not exist"),
        (circular, "cannot be read"),
        (deep, "nested too deeply"),
        (pipe, "is not a regular file"),
        (device, "is not a regular file"),
        (pipe_for_tokens, "is not a regular file"),
        (pipe_for_weights, "is not a regular file"),
        (directory, "is not a regular file"),
    ],
)
def test_odd_files_of_a_model_are_typed_errors(tmp_path, change, words):
    path = tokenizer_directory(tmp_path / "m")
    change(path)
    with pytest.raises(nanoactor.ModelError, match=words):
        AsyncLLM(str(path))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (models.WeightsError("x"), errors.WeightsError),
        (runtime.NodeDied("x"), errors.NodeDied),
        (MemoryError(), OutOfResources),
        (OSError(errno.EMFILE, "Too many open files", "/secret/path"), OutOfResources),
        (RuntimeError("can't start new thread"), OutOfResources),
    ],
)
def test_errors_from_below_are_translated(error, kind):
    made = translated(error)
    assert type(made) is kind
    assert "/secret" not in str(made)
    assert str(made)
    pickle.loads(pickle.dumps(made))


def test_what_nobody_has_thought_of_is_a_bug_of_ours_with_its_cause():
    @public
    def broken(value):
        return value.nothing

    @public
    async def broken_too(value):
        return value.nothing

    with pytest.raises(ProtocolBug, match="broken: AttributeError") as caught:
        broken(1)
    assert isinstance(caught.value.__cause__, AttributeError)
    with pytest.raises(ProtocolBug):
        asyncio.run(broken_too(1))
    with pytest.raises(InvalidRequest, match="missing a required argument"):
        asyncio.run(broken_too())
