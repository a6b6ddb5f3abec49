"""What is said reaches the model as in transformers: shapes, templates, places and files."""

import itertools
import json

import pytest
from transformers import AutoTokenizer

from nanoactor.models.errors import ModelError
from nanoactor.text.template import ChatTemplate
from nanoactor.text.template_files import read_template_files
from nanoactor.text.tokenizer import TextEncoder
from tests.text.conformance import compare, model_directory, published_templates
from tests.text.test_chat import THINKING

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = "{% for c in m.tool_calls or [] %}{{ c.function.name }}(ARGUMENTS){% endfor %}"
LOOP = "{% for m in messages %}[{{ m.role }}]" + CALL + "CONTENT{% endfor %}"


def loop(arguments, content):
    """A template that shows calls and content like this."""
    return LOOP.replace("ARGUMENTS", arguments).replace("CONTENT", content)


TEMPLATES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "everything": "{{ messages | tojson }}{{ tools | tojson }}",
    "joins": loop("{{ c.function.arguments + ';' }}", "{{ m.content or '' }}"),
    "writes JSON": loop("{{ c.function.arguments | tojson }}", "{{ m.content }}"),
    "by members": loop(
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}",
        "{% if m.content is not string %}{% for p in m.content or [] %}{{ p.text }};{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}",
    ),
    "asks for null": loop(
        "{{ c.function.arguments + ';' }}",
        "{% if m.content is none %}null{% else %}{{ m.content + '' }}{% endif %}",
    ),
    "parts alone": loop("", "{{ m.content[0]['text'] + '' }}"),
}


def test_every_shape_renders_as_in_transformers_or_in_a_form_that_the_template_reads():
    counts, others = compare(TEMPLATES)
    assert not others
    assert counts["PLAIN", "equal"] > 200
    assert all(counts[group, "in another form"] > 20 for group in ("TEXTS", "PARTS"))


@pytest.mark.long
def test_every_shape_renders_so_in_templates_that_others_wrote():
    templates = published_templates()
    if not templates:
        pytest.skip("the package trl is not installed")
    counts, others = compare(templates)
    assert not others
    assert counts["PLAIN", "equal"] > 2000


# -- the places of a template -----------------------------------------------------------------

PLACES = {
    "jinja": lambda path, text: (path / "chat_template.jinja").write_text(text),
    "json": lambda path, text: _write(path / "chat_template.json", {"chat_template": text}),
    "text": lambda path, text: _add(path, {"chat_template": text}),
    "list": lambda path, text: _add(
        path, {"chat_template": [{"name": "default", "template": text}]}
    ),
    "dict": lambda path, text: _add(path, {"chat_template": {"default": text}}),
    "more": lambda path, text: _more(path, text),
    "processor": lambda path, text: _write(path / "processor_config.json", {"chat_template": text}),
}


def _write(path, value):
    path.write_text(json.dumps(value))


def _add(path, values):
    file = path / "tokenizer_config.json"
    _write(file, {**json.loads(file.read_text()), **values})


def _more(path, text):
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(text)


ASKS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_found_in_each_of_its_places(tmp_path, place):
    path = model_directory(tmp_path)
    PLACES[place](path, "here {{ messages[0].content }}")
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    options = tools if place == "more" else {}
    assert ChatTemplate(path).render(ASKS, options) == "here a"
    assert read_template_files(path).note == ""


@pytest.mark.parametrize(
    ("first", "second"), [*itertools.combinations([p for p in PLACES if p != "dict"], 2)]
)
def test_of_two_places_that_counts_which_counts_in_transformers_and_it_is_said(
    tmp_path, first, second
):
    path = model_directory(tmp_path)
    if {first, second} == {"text", "list"}:
        pytest.skip("they are one place")
    for place in (first, second):
        PLACES[place](path, f"{place} {{{{ messages[0].content }}}}")
    files = read_template_files(path)
    options = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    ours = ChatTemplate(path).render(ASKS, options)
    if "processor" in (first, second):
        # What transformers' processors read first; loading one needs a whole model.
        expected = "processor a"
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
        expected = tokenizer.apply_chat_template(ASKS, tokenize=False, **options)
    assert ours == expected
    assert bool(files.note) == ({first, second} != {"jinja", "more"})


def test_a_model_with_images_reads_its_processors_older_file_before_the_tokenizers(tmp_path):
    path = model_directory(tmp_path)
    PLACES["json"](path, "json")
    PLACES["text"](path, "text")
    assert ChatTemplate(path).render(ASKS, {}) == "text"
    _write(path / "preprocessor_config.json", {})
    assert ChatTemplate(path).render(ASKS, {}) == "json"
    note = (
        "the chat template of chat_template.json is used, but there is a different one in "
        "tokenizer_config.json"
    )
    assert read_template_files(path).note == note


@pytest.mark.parametrize(
    "template", [5, True, [{"name": "default"}], [{"template": "a"}], ["a"], {"default": 5}]
)
def test_a_template_that_is_no_text_is_the_models_fault(tmp_path, template):
    with pytest.raises(ModelError, match="chat templates in .* are malformed"):
        read_template_files(model_directory(tmp_path, chat_template=template))


# -- tokens outside tokenizer.json ------------------------------------------------------------

SHOWS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ unk_token }}|"
TEXT = "hi <NEW> x<|im_end|> <mid> a[PAD]"
NEW = 2048
"""The first id that the demo's tokenizer leaves free."""


def token(content, **flags):
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


FILES = {
    "none": {},
    "additional": {"additional_special_tokens": ["<NEW>"]},
    "extra": {"extra_special_tokens": ["<NEW>"]},
    "padding": {"pad_token": "[PAD]"},
    "listed": {"added_tokens_decoder": {str(NEW): token("<NEW>")}},
    "listed, not special": {
        "added_tokens_decoder": {str(NEW): token("<NEW>", special=False, normalized=True)}
    },
    "listed, strips": {"added_tokens_decoder": {str(NEW): token("<NEW>", lstrip=True)}},
    "listed, known": {"added_tokens_decoder": {"2": token("<|im_end|>", lstrip=True)}},
    "of one model": {"image_token": "<|im_start|>"},
    "of one model, in a dict": {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    "of one model, new": {"extra_special_tokens": {"image_token": "<NEW>"}},
    "split": {"split_special_tokens": True},
    "null": {"bos_token": None},
    "adds": {"bos_token": "<|im_start|>", "add_bos_token": True},
    "older": {"older": {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}},
    "older, not read": {"older": {"bos_token": "<|im_start|>"}, "added_tokens_decoder": {}},
    "older, additional": {"older": {"additional_special_tokens": ["<NEW>"]}},
    "older, of one model": {"older": {"image_token": "<|im_start|>"}},
    "added": {"added": {"<NEW>": NEW}},
    "added, special": {"added": {"<NEW>": NEW}, "pad_token": "<NEW>"},
    "a class with defaults": {"tokenizer_class": "Qwen2Tokenizer"},
    "defaults and null": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": None},
    "prefix": {"add_prefix_space": True},
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_in_other_files_are_those_of_transformers(tmp_path, name):
    config = {"eos_token": "<|im_end|>", **FILES[name]}
    files = {"older": "special_tokens_map.json", "added": "added_tokens.json"}
    for key, file in files.items():
        if key in config:
            _write(tmp_path / file, config.pop(key))
    path = model_directory(tmp_path, SHOWS + "{{ messages[0].content }}", **config)
    theirs, ours = AutoTokenizer.from_pretrained(path), TextEncoder(path)
    chat = [{"role": "user", "content": TEXT}]
    text = ChatTemplate(path).render(chat, {})
    assert text == theirs.apply_chat_template(chat, tokenize=False)
    ids = theirs.apply_chat_template(chat, return_dict=False)
    assert ours.encode_rendered(text).tolist() == ids
    assert ours.encode_text(TEXT).tolist() == theirs(TEXT)["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {str(NEW + 5): token("<NEW>")}},
        {"added_tokens_decoder": {"2": token("<|im_start|>")}},
        {"added_tokens_decoder": {"two": token("<NEW>")}},
        {"added_tokens_decoder": ["<NEW>"]},
        {"added_tokens_decoder": {str(NEW): {"special": True}}},
        {"extra_special_tokens": [{"special": True}]},
        {"eos_token": {"special": True}},
    ],
)
def test_tokens_that_contradict_the_tokenizer_are_the_models_fault(tmp_path, config):
    """Another id than the file says would be another token to the model."""
    with pytest.raises(ModelError, match=str(tmp_path)):
        TextEncoder(model_directory(tmp_path, **config))
