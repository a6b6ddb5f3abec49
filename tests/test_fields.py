"""State has one owner: few fields a class, each assigned in one module."""

import ast
import dataclasses
from collections import defaultdict

import pytest

from nanoactor.scheduling.sequences.sequence import Sequence
from tests.product_files import ROOMS, matching

MOST = 25


def stores(tree):
    """All attributes that a piece of code assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def has_methods(node):
    """Whether a class is more than a record, or a list of options."""
    options = node.name.endswith(("Config", "Params"))
    return not options and any(isinstance(one, ast.FunctionDef) for one in node.body)


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_a_sequence_has_at_most_twenty_fields_beside_its_specification():
    names = [field.name for field in dataclasses.fields(Sequence)]
    assert "spec" in names
    assert len(names) - 1 <= 20, names


def test_what_a_class_lets_others_assign_is_assigned_in_one_module():
    places = defaultdict(set)
    for path in matching("nanoactor/scheduling/**/*.py"):
        for node in stores(ast.parse(path.read_text())):
            if not is_own(node):
                places[node.attr].add(path.name)
    assert "run" in places, "a grammar's run is assigned by constraints"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_no_class_assigns_more_fields_than_one_can_keep_in_mind(room):
    for path in matching(f"{room}/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and has_methods(node):
                fields = {store.attr for store in stores(node) if is_own(store)}
                fields |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
                assert len(fields) <= MOST, (node.name, sorted(fields))
