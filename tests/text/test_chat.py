"""Prompts become the ids that transformers makes of them; templates can do no harm."""

import datetime
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanoactor.errors import InvalidRequest
from nanoactor.messages.engine import RequestSpec, Stopping, Submit, TextOptions
from nanoactor.models.errors import ModelError
from nanoactor.models.sampling.columns import pack
from nanoactor.runtime import codec
from nanoactor.text.template import ChatTemplate
from nanoactor.text.tokenizer import TextEncoder as Encoder
from nanoactor.text.tokenizer import load_tokenizer
from tests.text.tokenizers_for_tests import DEMO, TEXTS, llama_like

CHAT = [
    {"role": "system", "content": "Be brief. <|im_end|>"},
    {"role": "user", "content": "Größe 和 'tis <b>&amp;</b>\n"},
    {"role": "assistant", "content": "e\u0301 👨\u200d👩\u200d👧"},
    {"role": "user", "content": "  and now?  "},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wie ist das Wetter in Zürich/北京 <now> & 'then'?",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
TOOL_CHAT = [
    {"role": "user", "content": "Weather in 北京?"},
    {
        "role": "assistant",
        "content": "<think>\nI must ask.\n</think>\n\nA moment.",
        "tool_calls": [
            {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "北京"}}}
        ],
    },
    {"role": "tool", "content": '{"grad": 21}'},
    {"role": "tool", "content": "windig"},
    {"role": "assistant", "content": "Mild.", "reasoning_content": "21 degrees"},
    {"role": "user", "content": "Thanks"},
]

# After the manner of Qwen3's: tools, thoughts that only the last turn keeps, and an empty
# thought where thinking is switched off.
THINKING = """\
{%- macro text(content) -%}
  {%- if content is string %}{{ content }}
  {%- elif content is iterable and content is not none %}
    {%- for part in content %}{{ part.text if part is mapping else part }}{% endfor %}
  {%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ text(messages[0].content) + '\\n\\n' }}{% endif %}
{{- "# Tools\\n<tools>" }}
{%- for tool in tools %}
{{- "\\n" }}{{ tool | tojson }}
{%- endfor %}
{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(asking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- set index = (messages|length - 1) - loop.index0 %}
  {%- if ns.asking and message.role == "user" and not text(message.content).startswith('<tool') %}
    {%- set ns.asking = false %}
    {%- set ns.last = index %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = text(message.content) %}
  {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
  {%- elif message.role == "assistant" %}
    {%- set thought = '' %}
    {%- if message.reasoning_content is string %}
      {%- set thought = message.reasoning_content %}
    {%- elif '</think>' in content %}
      {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
{{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last or (loop.last and thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
{{- content }}
    {%- for call in message.tool_calls or [] %}
      {%- set call = call.function if call.function else call %}
{{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
    {%- endfor %}
{{- '<|im_end|>\\n' }}
  {%- elif message.role == "tool" %}
    {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- '<|im_start|>user' }}
    {%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != "tool" %}
{{- '<|im_end|>\\n' }}
    {%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
  {%- endif %}
{%- endif %}
"""


class TextEncoder(Encoder):
    """With the template in this process; an engine renders elsewhere (test_renderer.py)."""

    def __init__(self, path):
        super().__init__(path)
        self._template = ChatTemplate(path)

    def render(self, messages, options):
        return self._template.render(messages, options)

    def encode_chat(self, messages, options):
        return self.encode_rendered(self.render(messages, options))


def directory(path, template=None, jinja=None, tokenizer=None, **config):
    """A model's directory with a tokenizer and these templates."""
    path.mkdir(exist_ok=True)
    if tokenizer is None:
        shutil.copy(DEMO / "tokenizer.json", path)
    else:
        tokenizer.save(str(path / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    if template is not None:
        values["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(values), "utf-8")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, "utf-8")
    return path


def check_same(path, messages, **options):
    """Text and ids are transformers'; returns the text."""
    theirs = AutoTokenizer.from_pretrained(path)
    values = {"add_generation_prompt": True} | options
    text = ChatTemplate(path).render(messages, options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **values)
    expected = theirs.apply_chat_template(messages, return_dict=False, **values)
    assert TextEncoder(path).encode_chat(messages, options).tolist() == expected
    return text


# -- the same as transformers -----------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}], ids=["open", "closed"])
def test_the_demos_conversations_are_encoded_as_transformers_does(options):
    text = check_same(DEMO, CHAT, **options)
    assert text.endswith("<|im_start|>assistant\n") == (not options)


@pytest.mark.parametrize("name", ["demo", "llama_like"])
def test_texts_are_encoded_as_transformers_does(tmp_path, name):
    path = DEMO if name == "demo" else directory(tmp_path, tokenizer=llama_like(), eos_token="</s>")
    theirs, ours = AutoTokenizer.from_pretrained(path), TextEncoder(path)
    for text in (*TEXTS, "<|im_start|>user\n", "a</s>b", "x" * 3000, " "):
        ids = ours.encode_text(text)
        assert ids.dtype == "int32"
        assert ids.tolist() == theirs(text)["input_ids"]


def test_only_text_prompts_get_the_tokenizers_own_special_tokens(tmp_path):
    path = directory(tmp_path, "{{ bos_token }}{{ messages[0].content }}", bos_token="<s>")
    shutil.copy(directory(tmp_path / "l", tokenizer=llama_like()) / "tokenizer.json", path)
    encoder = TextEncoder(path)
    bos = llama_like().token_to_id("<s>")
    assert encoder.encode_text("to be").tolist().count(bos) == 1
    assert encoder.encode_chat([{"role": "user", "content": "to be"}], {}).tolist().count(bos) == 1


def test_a_jinja_file_goes_before_the_configurations_template(tmp_path):
    path = directory(tmp_path, "from the configuration", "file: {{ messages[0].content }}\n\n")
    assert check_same(path, CHAT) == f"file: {CHAT[0]['content']}\n"


NAMED = [
    {"name": "tool_use", "template": "{{ tools | tojson }}"},
    {"name": "default", "template": "default {{ messages[-1].content }}"},
]


def test_of_several_templates_the_default_is_used(tmp_path):
    assert check_same(directory(tmp_path, NAMED), CHAT) == "default   and now?  "


def test_of_several_templates_the_one_for_tools_is_used_with_tools(tmp_path):
    check_same(directory(tmp_path, NAMED), CHAT, tools=TOOLS)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}",
        "{{ messages | tojson }} {{ tools | tojson }} {{ '<\u00e9\\'>' | tojson }}",
        "{{ tools | tojson(indent=2) }}{{ tools | tojson(indent=4, sort_keys=true) }}",
        "{{ messages | tojson(ensure_ascii=true) }}{{ tools | tojson(separators=(',', ':')) }}",
        "{{ strftime_now('%d %b %Y') }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        "{% if loop.index == 4 %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n"
        "  {% endif %}\n{% endfor %}\n\n",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{{ messages[0] | items | list }}{{ dict(a=1) }}",
        "{% if documents %}{{ documents[0].title }}{% else %}none{% endif %}{{ missing }}",
        "{{ flavour is defined }}{{ flavour }}{{ custom.list[1] }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    ],
    ids=[
        "special_tokens",
        "tojson",
        "tojson_indent",
        "tojson_options",
        "strftime_now",
        "loop_controls",
        "trimmed_blocks",
        "namespace",
        "documents",
        "own_options",
        "generation",
    ],
)
def test_templates_see_what_transformers_offers_them(tmp_path, template):
    tokens = {"bos_token": {"content": "<|im_start|>", "__type": "AddedToken"}}
    path = directory(tmp_path, template, **tokens, pad_token="<|endoftext|>", add_bos_token=True)
    options = {"documents": [{"title": "Ü", "text": ""}], "flavour": "süß"}
    check_same(path, CHAT, tools=TOOLS, custom={"list": [1, 2]}, **options)


def test_strftime_now_is_the_local_time(tmp_path):
    template = ChatTemplate(directory(tmp_path, "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"))
    before = datetime.datetime.now().replace(microsecond=0)
    now = datetime.datetime.fromisoformat(template.render(CHAT, {}))
    assert before <= now <= datetime.datetime.now()


def test_special_tokens_of_older_models_are_found_where_transformers_finds_them(tmp_path):
    path = directory(tmp_path, "{{ bos_token }}:{{ eos_token }}")
    tokens = {"bos_token": {"content": "<|im_start|>", "lstrip": False, "normalized": False}}
    (path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert check_same(path, CHAT) == "<|im_start|>:<|im_end|>"


@pytest.mark.parametrize("where", ["configuration", "file"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": TOOLS},
        {"enable_thinking": False},
        {"enable_thinking": True, "add_generation_prompt": False, "tools": TOOLS},
    ],
    ids=["plain", "tools", "no_thinking", "closed"],
)
def test_a_thinking_template_renders_as_in_transformers(tmp_path, options, where):
    place = {"template": THINKING} if where == "configuration" else {"jinja": THINKING}
    path = directory(tmp_path, **place)
    for messages in (CHAT, TOOL_CHAT, TOOL_CHAT[:-1], TOOL_CHAT[:2], CHAT[1:2]):
        text = check_same(path, messages, **options)
        assert ("Zürich/北京 <now> & 'then'" in text) == ("tools" in options)
        if options.get("enable_thinking") is False:
            assert text.endswith("assistant\n<think>\n\n</think>\n\n")


KEYS = "{% for key in messages[0] | list | sort %}{{ key }}={{ messages[0][key] }};{% endfor %}"


def test_empty_fields_are_left_out_and_reasoning_goes_by_every_name(tmp_path):
    # As transformers does in its later versions; before, templates saw the fields as given.
    template = ChatTemplate(directory(tmp_path, KEYS))
    assert template.render([{"role": "a", "content": None}], {}) == "role=a;"
    text = template.render([{"role": "a", "content": "x", "reasoning": "r"}], {})
    assert text == "content=x;reasoning=r;reasoning_content=r;role=a;thinking=r;"


def test_options_may_replace_a_special_token(tmp_path):
    path = directory(tmp_path, "{{ eos_token }}")
    assert check_same(path, CHAT, eos_token="mine") == "mine"


def test_truncation_and_padding_saved_with_the_tokenizer_do_not_apply(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    path = directory(tmp_path / "short", "{{ messages[1].content }}", tokenizer=tokenizer)
    check_same(path, CHAT)
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=64)
    path = directory(tmp_path / "long", "{{ messages[1].content }}", tokenizer=tokenizer)
    check_same(path, CHAT)
    theirs = AutoTokenizer.from_pretrained(path)
    assert TextEncoder(path).encode_text("to be").tolist() == theirs("to be")["input_ids"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ [{'role': 'system', 'content': 'default'}] + messages }}",
        "{% for m in messages %}{{ m.parts }}{{ m.calls[0].arguments }}{% endfor %}{{ tools }}",
    ],
    ids=["joined", "printed"],
)
def test_a_conversation_that_travelled_between_processes_is_rendered_the_same(tmp_path, template):
    template = ChatTemplate(directory(tmp_path, template))
    messages = [
        {"role": "user", "parts": ["a", "b"], "calls": [{"arguments": {"days": [1, 2]}}]},
        {"role": "user", "parts": [], "calls": [{"arguments": {}}]},
    ]
    sampling, stopping = pack({}), Stopping(1, 0, (), ())
    options = TextOptions((), False, True, 0)
    none = np.empty(0, np.int32)
    chat, given = json.dumps(messages), json.dumps({"tools": TOOLS})
    submit = Submit(0, RequestSpec(0, sampling, stopping, options), None, chat, given, none)
    arrived = codec.decode(codec.encode(submit).to_bytes(0), 0)
    expected = template.render(messages, {"tools": TOOLS})
    assert template.render(json.loads(arrived.chat), json.loads(arrived.chat_options)) == expected


# -- what is wrong is said --------------------------------------------------------------------


def test_a_model_without_template_refuses_messages(tmp_path):
    for config in ({}, {"template": [{"name": "rag", "template": "x"}]}):
        path = directory(tmp_path, **config)
        with pytest.raises(InvalidRequest, match="no chat template"):
            TextEncoder(path).encode_chat(CHAT, {})
    assert len(TextEncoder(path).encode_text("text is served"))


def test_a_templates_refusal_is_an_invalid_request_with_its_words(tmp_path):
    template = "{{ raise_exception('roles must alternate, not ' + messages[0].role) }}"
    with pytest.raises(InvalidRequest, match="roles must alternate, not system"):
        ChatTemplate(directory(tmp_path, template)).render(CHAT, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'x'.index('y') }}",
        "{{ missing_function() }}",
        "{{ {'a': missing} | tojson }}",
        "{% include 'other' %}",
        "{{ 1 / (messages | length - 4) }}",
        "{{ range(10 ** 6) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x'.encode('no such encoding') }}",
        "{{ cycler() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_an_invalid_request(tmp_path, template):
    with pytest.raises(InvalidRequest, match="template"):
        ChatTemplate(directory(tmp_path, template)).render(CHAT, {})


def test_what_cannot_be_written_as_json_is_an_invalid_request(tmp_path):
    template = ChatTemplate(directory(tmp_path, "{{ tools | tojson }}"))
    deep = []
    for _ in range(200_000):
        deep = [deep]
    for tools in ([{1, 2}], [b"bytes"], deep):
        with pytest.raises(InvalidRequest, match="template"):
            template.render(CHAT, {"tools": tools})


def test_options_that_clash_with_the_messages_are_an_invalid_request():
    with pytest.raises(InvalidRequest, match="messages"):
        ChatTemplate(DEMO).render(CHAT, {"messages": CHAT})


def test_a_lone_surrogate_in_a_conversation_is_an_invalid_request():
    with pytest.raises(InvalidRequest):
        TextEncoder(DEMO).encode_chat([{"role": "user", "content": "a\ud800"}], {})


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 'open }}", "{% for m in messages %}", "{{ a | nonsense }}"]
)
def test_a_malformed_template_is_the_models_fault(tmp_path, template):
    with pytest.raises(ModelError, match="template"):
        ChatTemplate(directory(tmp_path, template)).render(CHAT, {})


def test_a_malformed_template_is_found_before_the_first_conversation_needs_it(tmp_path):
    # At the start it is the model's error; later it would end an engine that serves others.
    with pytest.raises(ModelError, match="template"):
        TextEncoder(directory(tmp_path, "{% if %}"))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_malformed_tokenizer_is_the_models_fault(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_the_models_fault(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist"):
        TextEncoder(tmp_path)


def test_a_malformed_tokenizer_configuration_is_the_models_fault(tmp_path):
    path = directory(tmp_path)
    for content in ("{", "[]"):
        (path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
            TextEncoder(path)


def test_a_tokenizer_alone_serves_text(tmp_path):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    expected = TextEncoder(DEMO).encode_text("to be")
    assert TextEncoder(tmp_path).encode_text("to be").tolist() == expected.tolist()


# -- templates are strangers' programs --------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__class__.__base__.__subclasses__()",
        "(messages | attr('__class__')).mro()",
        "messages['__class__'].mro()",
        "cycler.__init__.__globals__.os.system('touch MARK')",
        "lipsum.__globals__['os'].system('touch MARK')",
        "raise_exception.__globals__['__builtins__']['open']('MARK', 'w')",
        "strftime_now.__globals__['json'].codecs.open('MARK', 'w')",
        "namespace.__init__.__globals__",
        "self.__init__.__globals__",
        "'{0.__class__.__mro__}'.format(messages)",
        "'{a.__init__.__globals__}'.format_map({'a': messages})",
        "messages.append('more')",
        "messages[0].update(role='admin')",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, attack):
    mark = tmp_path / "mark"
    path = directory(tmp_path, "{{ " + attack.replace("MARK", str(mark)) + " }}")
    messages = [dict(message) for message in CHAT]
    with pytest.raises(InvalidRequest):
        ChatTemplate(path).render(messages, {})
    assert not mark.exists()
    assert messages == CHAT


def test_what_the_sandbox_hides_renders_as_nothing(tmp_path):
    hidden = ("''.__class__", "messages['__class__']", "'{0.__class__}'.format(messages)")
    template = "".join("{{ " + expression + " }}" for expression in hidden)
    assert ChatTemplate(directory(tmp_path, template)).render(CHAT, {}) == ""


# -- going on with the last message -----------------------------------------------------------


@pytest.mark.parametrize("last", ["To be, or", "To be, or  ", "\n To be", "a\n\nb \n"])
@pytest.mark.parametrize("template", [None, THINKING], ids=["demo", "thinking"])
def test_the_last_message_is_continued_as_in_transformers(tmp_path, template, last):
    path = DEMO if template is None else directory(tmp_path, template)
    messages = [CHAT[1], {"role": "assistant", "content": last}]
    check_continued(path, messages)


# What a search for the text would find elsewhere: in what the template writes behind it, in a call
# of the same message, in what the user said.
ELSEWHERE = ["end", "i", "<", "|", ">", "im_end", "assistant", "Größe", ""]


@pytest.mark.parametrize("last", ELSEWHERE)
@pytest.mark.parametrize("template", [None, THINKING], ids=["demo", "thinking"])
def test_the_place_to_continue_at_is_marked_and_not_searched_for(tmp_path, template, last):
    path = DEMO if template is None else directory(tmp_path, template)
    check_continued(path, [CHAT[1], {"role": "assistant", "content": last}])


def test_text_that_stands_in_a_call_or_in_parts_is_continued_at_its_own_place(tmp_path):
    path = directory(tmp_path, THINKING)
    call = {"type": "function", "function": {"name": "ok", "arguments": {"ok": "ok"}}}
    check_continued(path, [CHAT[1], {"role": "assistant", "content": "ok", "tool_calls": [call]}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "ok "}]
    check_continued(path, [CHAT[1], {"role": "assistant", "content": parts}])


def check_continued(path, messages):
    last = messages[-1]["content"]
    theirs = AutoTokenizer.from_pretrained(path).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    text = ChatTemplate(path).render(messages, {"continue_final_message": True})
    assert text == theirs
    if isinstance(last, str):
        assert text.endswith((last.strip(), last.lstrip()))


@pytest.mark.parametrize(
    ("content", "options", "error"),
    [
        (None, {}, "to have text as its content"),
        ([{"type": "image"}], {}, "to have text as its content"),
        ("a", {"add_generation_prompt": True}, "are mutually exclusive"),
        ("<think>x</think>y", {}, "changes the content"),
        ("y<think>", {}, "changes the content"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path, content, options, error):
    path = directory(tmp_path, "{{ messages[0].content | string | replace('<think>', '') }}!")
    with pytest.raises(InvalidRequest, match=error):
        ChatTemplate(path).render(
            [{"role": "assistant", "content": content}],
            {"continue_final_message": True, **options},
        )


def test_ids_are_decoded_with_their_special_tokens():
    encoder = TextEncoder(DEMO)
    ids = encoder.encode_chat(CHAT, {}).tolist()
    assert encoder.decode(ids) == encoder.render(CHAT, {})
    for wrong in (-1, 2048):
        with pytest.raises(InvalidRequest, match="not in the vocabulary"):
            encoder.decode([5, wrong])


def test_special_tokens_may_be_left_out(tmp_path):
    encoder = TextEncoder(directory(tmp_path, tokenizer=llama_like(), eos_token="</s>"))
    plain = encoder.encode_text("Hello", special=False).tolist()
    assert encoder.encode_text("Hello").tolist() == [1, *plain]
