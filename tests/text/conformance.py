"""Comparisons of templates and tokenizers with transformers; `python -m tests.text.conformance`
prints the table of all of them."""

import collections
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from transformers import AutoTokenizer
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from nanoactor.errors import InvalidRequest
from nanoactor.text.template import ChatTemplate
from nanoactor.text.tokenizer import TextEncoder
from tests.text.shapes import CALLS, PARTS, PLAIN, TEXTS, TOOLS
from tests.text.tokenizers_for_tests import DEMO

OPTIONS = ({}, {"tools": TOOLS}, {"add_generation_prompt": False, "enable_thinking": False})
SPECIAL = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def as_later(messages):
    """Messages as later versions of transformers make them before they are rendered: the older
    ones that we run with neither leave out what is null nor give thoughts their other names."""
    if hasattr(chat_template_utils, "_normalize_chat_messages"):
        return messages
    found = []
    for given in messages:
        message = {name: value for name, value in given.items() if value is not None}
        names = ("reasoning_content", "thinking", "reasoning")
        thoughts = next((message[name] for name in names if name in message), None)
        if thoughts is not None:
            message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
        found.append(message)
    return found


def model_directory(path, template=None, **config):
    """A directory with the demo's tokenizer, this template and this configuration."""
    path.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(DEMO / name, path)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps({**CLASS, **config}))
    return path


def published_templates():
    """Chat templates that others wrote, by name: those of the trl package, where it is installed.
    It is found and not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        return {}
    files = sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    return {path.stem: path.read_text() for path in files}


class Comparison:
    """One template, by us and by transformers."""

    def __init__(self, path):
        self.ours, self._encoder = ChatTemplate(path), TextEncoder(path)
        self.theirs = AutoTokenizer.from_pretrained(path)

    def __call__(self, messages, options):
        """The text of ours, or None where the template refuses; the ids are those of the text."""
        try:
            text = self.ours.render(json.loads(json.dumps(messages)), options)
        except InvalidRequest:
            return None
        ids = self.theirs(text, add_special_tokens=False)["input_ids"]
        assert self._encoder.encode_rendered(text).tolist() == ids
        return text

    def by_transformers(self, messages, options, as_they_are=False):
        """The same of theirs; `as_they_are`: members that are null are not left out."""
        values = {"add_generation_prompt": True, **options}
        try:
            if as_they_are:
                values |= {"chat_template": self.theirs.chat_template}
                values |= self.theirs.special_tokens_map
                return render_jinja_template([messages], **values)[0][0]
            messages = as_later(messages)
            return self.theirs.apply_chat_template(messages, tokenize=False, **values)
        except Exception:  # a template is a program: it can fail in any way
            return None

    def outcome(self, group, name, options):
        """What becomes of a shape: "equal", "refused", as "in another form", or "other"."""
        messages = {"PLAIN": PLAIN, "CALLS": CALLS, "TEXTS": TEXTS, "PARTS": PARTS}[group][name]
        ours, theirs = self(messages, options), self.by_transformers(messages, options)
        if ours == theirs:
            return "refused" if ours is None else "equal"
        # A form that the template cannot read, or prints as Python does: another is given to it.
        for other in _forms(messages):
            if ours in (self.by_transformers(other, options, plain) for plain in (False, True)):
                return "in another form"
        return "other"


def _forms(messages):
    """The same messages in other forms."""
    for content in (None, "", "drop"):
        for arguments in (json.loads, json.dumps, str):
            for parts in (list, "\n".join, _one_part):
                yield [_in_form(message, content, arguments, parts) for message in messages]
    for parts in (list, _one_part):
        for roles in (("system", "assistant"), [message["role"] for message in messages]):
            yield [
                _in_form(message, None, json.loads, parts, whole=message["role"] in roles)
                for message in messages
            ]


def _one_part(texts):
    return _parts(["\n".join(texts)])


def _parts(texts):
    return [{"type": "text", "text": text} for text in texts]


def _in_form(message, null, arguments, parts, whole=False):
    message = dict(message)
    if message.get("content") is None and "content" in message:
        message["content"] = null
    if null == "drop" and message.get("content") == "drop":
        del message["content"]
    if isinstance(message.get("content"), list) and parts is not list:
        message["content"] = parts([part["text"] for part in message["content"]])
    if whole and isinstance(message.get("content"), str):
        message["content"] = _parts([message["content"]])
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, arguments) for call in message["tool_calls"]]
    return message


def _call(call, arguments):
    given = call["function"]["arguments"]
    if isinstance(given, str) and arguments is json.loads:
        given = json.loads(given)
    elif not isinstance(given, str) and arguments is json.dumps:
        given = json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": given}}


def compare(templates):
    """Counts of outcomes by group of shapes, and what is "other"."""
    counts, others = collections.Counter(), []
    shapes = {"PLAIN": PLAIN, "CALLS": CALLS, "TEXTS": TEXTS, "PARTS": PARTS}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (template, source) in enumerate(templates.items()):
            path = model_directory(Path(scratch) / str(number), source, **SPECIAL)
            comparison = Comparison(path)
            for group, names in shapes.items():
                for name in names:
                    for options in OPTIONS:
                        found = comparison.outcome(group, name, options)
                        counts[group, found] += 1
                        if found == "other":
                            others.append((template, group, name, sorted(options)))
    return counts, others


def main():
    """Print the table."""
    templates = published_templates()
    counts, others = compare(templates)
    print(f"{len(templates)} templates, {len(OPTIONS)} sets of options")
    for group in ("PLAIN", "CALLS", "TEXTS", "PARTS"):
        found = ", ".join(
            f"{outcome} {counts[group, outcome]}"
            for outcome in ("equal", "in another form", "refused", "other")
        )
        print(f"{group}: {found}")
    for other in others:
        print(other)


if __name__ == "__main__":
    main()
