"""docs/troubleshooting.md quotes messages that the code has, and knows every error and status."""

import inspect
import re

import pytest

from nanoactor import errors
from tests.docs.messages import corpus, is_of_the_code
from tests.product_files import ROOT, matching

PAGE = ROOT / "docs" / "troubleshooting.md"


def section(title):
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def quoted():
    """Messages in the first two cells of tables: code of more than three words."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| "):
            for code in re.findall(r"`([^`]+)`", "|".join(line.split(" | ")[:2])):
                if len(code.split()) > 3:
                    yield code
    yield "cannot listen on"
    yield "ended unexpectedly: \0"


@pytest.mark.parametrize("message", [*quoted()])
def test_a_quoted_message_is_one_of_the_code(message):
    message = message.removesuffix(" signal SIGKILL") if "SIGKILL" in message else message
    assert is_of_the_code(message) or in_argparse(message)


def in_argparse(message):
    return message == "unrecognized arguments:"


def test_many_messages_are_quoted():
    assert len([*quoted()]) > 30


def test_each_error_is_explained_once():
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.NanoactorError)
    }
    rows = re.findall(r"^\| `(\w+)` \|", section("Errors by name"), re.MULTILINE)
    assert sorted(rows) == sorted(classes)


def test_each_status_and_code_of_the_server_is_explained():
    rows = re.findall(r"^\| (\d{3}) \| (?:`(\w+)`)? ?\|", section("HTTP statuses"), re.MULTILINE)
    statuses, codes = {int(status) for status, _ in rows}, {code for _, code in rows if code}
    there, named = set(), set()
    for path in matching("nanoactor/server/**/*.py"):
        text = path.read_text()
        there |= {int(status) for status in re.findall(r"APIError\(\s*(\d{3})", text)}
        named |= set(re.findall(r"code=\"(\w+)\"", text))
    assert there <= statuses
    assert statuses - there == {414, 499}, "of connections.py and of the log"
    assert codes == named


@pytest.mark.parametrize(
    "page", ["troubleshooting.md", "benchmarking.md", "memory.md", "offline.md"]
)
def test_metrics_on_a_page_are_those_of_the_server(page):
    """The code has their names in parts: without the prefix, and counters without `_total`."""
    strings = {string.removeprefix("\0_").removeprefix("nanoactor_") for string in corpus()}
    text = (ROOT / "docs" / page).read_text()
    names = set(re.findall(r"\bnanoactor_([a-z_]+[a-z])\b", text))
    assert names
    for name in names:
        assert {name, name.removesuffix("_total"), name.removeprefix("actor_")} & strings, name
