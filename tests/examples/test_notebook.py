"""The notebook runs from top to bottom."""

import ast

import pytest

from tests.product_files import ROOT

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def test_the_notebook_runs():
    nbformat = pytest.importorskip("nbformat", reason="pip install 'nanoactor[examples]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'nanoactor[examples]'")
    pytest.importorskip("ipykernel", reason="pip install 'nanoactor[examples]'")
    folder = ROOT / "examples"
    notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:  # what it prints now, and not what it printed once
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(
        notebook,
        timeout=None,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    _, texts, several, chat, form, end, stream = (
        cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    )
    assert not end
    assert said(texts).count("---\n") == 2
    assert said(texts).startswith("ROMEO:\n")
    assert said(several).count(" per token  ") == 3
    assert said(chat).count("assistant: ") == 2
    assert "tokens were in the cache)" in said(chat)
    mood = ast.literal_eval(form[0]["data"]["text/plain"])
    assert mood["mood"] in ("merry", "sad", "angry")
    assert 1 <= mood["strength"] <= 10
    assert len(said(stream)) > 20


def said(outputs):
    """What a cell has printed."""
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")
