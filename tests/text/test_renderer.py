"""Templates that do not end, fill the memory, write too much or crash: an error, and on we go."""

import json
import os
import queue
import signal
import time

import pytest

from nanoactor.errors import InvalidRequest
from nanoactor.models.errors import ModelError
from nanoactor.text.renderer import (
    Cancelled,
    Renderer,
    RenderOptions,
    RenderQueue,
    TimeLimitExceeded,
)
from tests.conftest import children
from tests.text.test_chat import CHAT, THINKING, ChatTemplate, directory

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
HANG = "{% if messages[-1].content == 'hang' %}" + LOOP + "{% endif %}{{ messages[-1].content }}"
LIMITS = RenderOptions(0.3, 10_000)


def said(content):
    return json.dumps([{"role": "user", "content": content}])


@pytest.fixture
def rendering(tmp_path):
    made = []

    def make(template, limits=LIMITS):
        made.append(Renderer(directory(tmp_path, template), limits))
        return made[-1]

    before = children()
    yield make
    for renderer in made:
        renderer.end()
    assert children() == before


def test_it_renders_as_the_template_does(rendering):
    renderer = rendering(THINKING)
    options = {"enable_thinking": False}
    expected = ChatTemplate(renderer._directory).render(CHAT, options)
    assert renderer.render(json.dumps(CHAT), json.dumps(options), 0.3) == expected
    facts, problem = renderer.describe()
    assert all((facts.exists, facts.renders_tools, facts.has_reasoning, not problem))
    assert "enable_thinking" in facts.variables
    assert facts.thoughts == "optional"


@pytest.mark.parametrize(
    ("image", "shows"),
    [
        ("{{ '<image>' }}", True),
        ("{% if message.role == 'user' %}{{ '<image>' }}{% endif %}", False),
        ("", False),
    ],
)
def test_images_of_results_are_found_by_trying(rendering, image, shows):
    part = f"{{% if part.type == 'image' %}}{image}{{% else %}}{{{{ part.text }}}}{{% endif %}}"
    content = f"{{% for part in message.content %}}{part}{{% endfor %}}"
    message = "{{ message.role }} {% if message.content is string %}{{ message.content }}"
    message += f"{{% else %}}{content}{{% endif %}}"
    facts, problem = rendering(f"{{% for message in messages %}}{message}{{% endfor %}}").describe()
    assert (facts.renders_result_images, problem) == (shows, "")


@pytest.mark.parametrize(
    ("template", "thoughts"),
    [
        ("assistant\n", "none"),
        ("assistant\n{# <think> #}", "optional"),
        ("assistant\n<think>\n", "open"),
        ("assistant\n<think>\n\n</think>\n\n", "none"),
        ("assistant\n{% if thinking %}<think>{% else %}</think>{% endif %}", "none"),
        ("{{ raise_exception('<think>') }}", "optional"),
    ],
)
def test_whether_thoughts_may_follow_is_found_out_by_trying(rendering, template, thoughts):
    facts, problem = rendering(template).describe()
    assert (facts.thoughts, problem) == (thoughts, "")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LOOP, None),
        (LOOP.replace("{% endfor %}", "x{% endfor %}", 1), "more than 10000 characters"),
        (
            "{% set n = namespace(t='x') %}{% for i in range(64) %}{% set n.t = n.t + n.t %}"
            "{% endfor %}{{ n.t | length }}",
            None,
        ),
        ("{{ raise_exception('no') }}", "rejects these messages: no"),
    ],
)
def test_a_template_that_goes_too_far_is_an_error_and_the_next_conversation_is_rendered(
    rendering, template, text
):
    renderer = rendering("{% if messages[-1].content == 'go' %}" + template + "{% endif %}well")
    for _ in range(2):
        # A doubled text may take all the time before it takes all the memory.
        with pytest.raises((InvalidRequest, TimeLimitExceeded), match=text):
            renderer.render(said("go"), "{}", 0.3)
        assert renderer.render(said("a"), "{}", 30) == "well"


def test_a_template_that_hangs_when_it_is_compiled_is_an_error(rendering, monkeypatch):
    monkeypatch.setattr("nanoactor.text.renderer._STARTUP_SECONDS", 0.7)
    renderer = rendering("{{ 7 ** (10 ** 9) }}")
    with pytest.raises(InvalidRequest, match="chat template was stopped"):
        renderer.describe()


def test_a_template_that_hangs_when_it_is_tried_is_described_by_its_source(rendering):
    facts, problem = rendering("{{ flavour }}" + LOOP).describe()
    assert facts.exists
    assert "flavour" in facts.variables
    assert not facts.renders_tools
    assert "took longer" in problem


def test_a_malformed_template_is_the_models_fault(rendering):
    with pytest.raises(ModelError, match="malformed"):
        rendering("{% if %}").describe()


def test_a_child_that_dies_is_replaced(rendering):
    renderer = rendering("{{ messages[-1].content }}")
    for content in "abc":
        assert renderer.render(said(content), "{}", 30) == content
        os.kill(renderer._child.process.pid, signal.SIGKILL)


# -- the queue ----------------------------------------------------------------------------


@pytest.fixture
def rendered(tmp_path):
    """A queue for a template that hangs when asked to, and what came of each conversation."""
    templates = RenderQueue(directory(tmp_path, HANG), RenderOptions(60.0, 10_000))
    results = queue.SimpleQueue()
    templates.describe()

    def render(number, content):
        templates.render(number, said(content), "{}", lambda result: results.put((number, result)))

    yield templates, render, lambda: results.get(timeout=30)
    before = time.monotonic()
    templates.close()
    assert time.monotonic() - before < 10
    assert not [pid for pid in children() if "na:template" in title(pid)]


def title(pid):
    with open(f"/proc/{pid}/comm") as file:
        return file.read()


def test_one_that_hangs_lets_those_behind_it_go_first(rendered):
    templates, render, next_ = rendered
    contents = ["hang", "a", "hang", "b", "c"]
    for number, content in enumerate(contents):
        render(number, content)
    assert [next_() for _ in range(3)] == [(1, "a"), (3, "b"), (4, "c")]
    for number in (0, 2):
        templates.cancel(number)
        assert isinstance(next_()[1], Cancelled)


def test_conversations_come_in_their_order(rendered):
    _, render, next_ = rendered
    for number in range(20):
        render(number, f"say {number}")
    assert [next_() for _ in range(20)] == [(n, f"say {n}") for n in range(20)]


def test_a_rendering_that_is_cancelled_ends_at_once_and_the_others_go_on(rendered):
    templates, render, next_ = rendered
    for number, content in enumerate(["hang", "a"]):
        render(number, content)
    templates.cancel(0)
    assert isinstance(next_()[1], Cancelled)
    assert next_() == (1, "a")
    render(2, "hang")
    time.sleep(1.5)  # its second turn is under way
    templates.cancel(2)
    render(3, "b")
    assert isinstance(next_()[1], Cancelled)
    assert next_() == (3, "b")


def test_one_that_waits_may_be_cancelled_too(rendered):
    templates, render, next_ = rendered
    for number, content in enumerate(["hang", "a", "b"]):
        render(number, content)
    templates.cancel(1)
    templates.cancel(0)
    templates.cancel(7)
    assert [type(next_()[1]) for _ in range(2)] == [Cancelled, Cancelled]
    assert next_() == (2, "b")


def test_a_queue_may_be_closed_while_a_template_hangs(rendered):
    _, render, _ = rendered
    render(0, "hang")
    time.sleep(0.2)
