"""The table of other engines' names is that of the code, and of docs/migrating_from_vllm.md."""

import dataclasses

import pytest

from nanoactor.options.config import EngineConfig
from nanoactor.requests.known_names import ENGINE, NAMES, SAMPLING, SERVER
from nanoactor.requests.params import SamplingParams
from nanoactor.server.config import ServerConfig
from tests.compat.names_table import DOCUMENT, TABLES, table, written

FIELDS = {
    "engine": {field.name for field in dataclasses.fields(EngineConfig)},
    "server": {field.name for field in dataclasses.fields(ServerConfig)} | {"config"},
    "sampling": {field.name for field in dataclasses.fields(SamplingParams)},
}
ALL = [*ENGINE, *SERVER, *SAMPLING]


@pytest.mark.parametrize("name", ALL, ids=[f"{one.scope}-{one.theirs}" for one in ALL])
def test_each_name_leads_to_a_field_or_says_why_it_does_not(name):
    if name.ours:
        assert name.ours in FIELDS[name.scope]
        assert not name.accepts
    elif name.scope == "sampling":
        assert name.accepts or name.note
    else:
        assert name.note, "a reason"
        assert name.theirs not in FIELDS[name.scope], "an option of ours"


def test_each_name_stands_once():
    assert len(NAMES) == len(ENGINE) + len(SERVER)
    assert len({one.theirs for one in SAMPLING}) == len(SAMPLING)


@pytest.mark.parametrize("title", TABLES)
def test_the_document_has_the_tables(title):
    assert table(TABLES[title]) in DOCUMENT.read_text(), "python -m tests.compat.names_table"
    assert written(DOCUMENT.read_text()) == DOCUMENT.read_text()
