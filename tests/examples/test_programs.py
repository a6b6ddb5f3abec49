"""Examples that start an engine, use it and end."""

import ast
import json
import re
import runpy

import jsonschema
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from nanoactor.model_files.files import resolve_model
from tests.examples.running import run
from tests.product_files import ROOT

pytestmark = pytest.mark.drawn(2)

PROMPTS = ROOT / "examples" / "prompts.jsonl"
GREEDY = b'{"id": 7, "prompt": "JULIET:", "temperature": 0, "max_tokens": 8}\n'
WRONG = {
    b"": "JSONDecodeError",
    b"[]": "either `prompt` or `messages`",
    b'{"prompt": "a", "messages": []}': "either `prompt` or `messages`",
    b'{"prompt": "a", "params": 3}': "no parameter 'params'",
    b'{"prompt": "a", "n": 2}': "`n` must be 1",
    b'{"prompt": "a", "max_tokens": 999999}': "InvalidRequest",
    b"[" * 100_000: "RecursionError",
    b'"\xff"': "UnicodeDecodeError",
}


def test_a_file_of_prompts_is_answered_line_by_line(tmp_path):
    given, written = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    ours = PROMPTS.read_bytes().splitlines()
    half = b'{"id": "\\ud800", "prompt": "KING:", "max_tokens": 1}'
    given.write_bytes(b"\n".join([*ours, *WRONG, half]) + b"\n" + 9 * GREEDY)
    said = run("offline_batch.py", given, written, "--max-tokens", 16)
    lines = written.read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    count = len(ours) + len(WRONG) + 10
    assert [answer["line"] for answer in answers] == list(range(1, count + 1))
    wrong = {answer["line"]: answer["error"] for answer in answers if "error" in answer}
    assert said.startswith(f"{count} lines, {len(wrong)} with an error")

    names = ["romeo", "greedy", "chat", "choice", "empty", "typo", None, "last"]
    assert [answer["id"] for answer in answers[: len(ours)]] == names
    assert answers[0]["output_tokens"] == 16
    assert answers[0]["finish_reason"] == "length"
    assert answers[3]["text"] in ("To be.", "Not to be.")
    assert "did you mean temperature?" in wrong[6]
    for number, part in enumerate(WRONG.values(), len(ours) + 1):
        assert part in wrong[number]
    assert set(wrong) == {5, 6, 7, *range(len(ours) + 1, len(ours) + len(WRONG) + 1)}
    assert answers[-10]["id"] == "\ud800"
    texts = [answer["text"] for answer in answers[-9:]]
    assert len(set(texts)) == 1
    assert texts[0]


def test_streams_are_printed_as_they_arrive():
    # On a busy machine all of a short stream may arrive at once.
    for tokens in (60, 240, 900):
        said = run("streaming.py", "--max-tokens", tokens)
        shown, *wholes = said.split("\n--- stream ")
        pieces = re.findall(r"^ *\d+\.\d{3} s  stream (\d)  ('.*'|\".*\")$", shown, re.M)
        assert len(pieces) == len(shown.splitlines())
        order = [number for number, _ in pieces]
        assert set(order) == {"1", "2", "3"}
        are_mixed = order.index("3") < len(order) - 1 - order[::-1].index("1")
        if are_mixed:
            break
    assert are_mixed, "one after the other"
    for number, (whole, prompt) in enumerate(
        zip(wholes, ("ROMEO:\n", "JULIET:\n", "HAMLET:\n"), strict=True), 1
    ):
        text = "".join(ast.literal_eval(text) for at, text in pieces if at == str(number))
        assert len(text) > 20
        assert whole == f"{number} ---\n{prompt}{text}\n"


def test_a_form_is_filled_in():
    shown, written = run("structured_output.py").splitlines()
    example = runpy.run_path(str(ROOT / "examples" / "structured_output.py"))
    found = json.loads(written)
    jsonschema.validate(found, example["SCHEMA"])
    assert shown == repr(example["Character"](**found))


def test_images_are_read(tmp_path):
    drawn = tmp_path / "drawn.png"
    image = Image.new("RGB", (64, 48), "white")
    ImageDraw.Draw(image).text((12, 8), "42", fill="black", font=ImageFont.load_default(24))
    image.save(drawn)
    theirs = ROOT / "examples" / "three-digits.png"
    said = run("images.py", drawn, theirs).splitlines()
    assert said == [f"{drawn}: 42", f"{theirs}: 079"]


def compared(*arguments):
    """(What it says, cosines of all pairs, the query, documents with scores as ranked)."""
    lines = run("embeddings.py", *arguments).splitlines()
    cosines = np.array([[float(word) for word in line.split()] for line in lines[2:6]])
    ranked = [line.strip().split("  ", 1) for line in lines[8:]]
    return lines[0], cosines, lines[7], [(text, float(score)) for score, text in ranked]


def check_ranked(texts, query, ranked, cosines):
    """Documents are ranked by their vectors' cosine with that of the query."""
    assert query == texts[0]
    right = dict(zip(texts, cosines[0], strict=True))
    assert [text for text, _ in ranked] == sorted(texts[1:], key=right.get, reverse=True)
    for text, score in ranked:
        assert score == pytest.approx(right[text], abs=2e-6)


@pytest.fixture
def texts():
    example = runpy.run_path(str(ROOT / "examples" / "embeddings.py"))
    return [example["QUERY"], *example["DOCUMENTS"]]


def test_texts_are_compared_and_ranked(texts):
    said, cosines, query, ranked = compared()
    assert said == "4 vectors of 256 numbers"
    assert np.diag(cosines) == pytest.approx(np.ones(4), abs=2e-6)
    assert (cosines == cosines.T).all()
    assert len(set(cosines[np.triu_indices(4, 1)])) == 6, "all texts differ"
    check_ranked(texts, query, ranked, cosines)


@pytest.mark.long
def test_vectors_are_those_of_an_embedding_model(tmp_path, texts):
    """Of a checkpoint that says how it pools, as transformers computes them."""
    import torch
    from tokenizers import Tokenizer

    from tests.pooling.checkpoints import make_embedder

    model = make_embedder(tmp_path, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(resolve_model("demo") / name)
    reader = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    vectors = []
    for text in texts:
        with torch.inference_mode():
            states = model(torch.tensor([reader.encode(text).ids])).last_hidden_state[0]
        vectors.append(states[-1].double().numpy() / np.linalg.norm(states[-1].double()))
    right = np.stack(vectors) @ np.stack(vectors).T
    said, cosines, query, ranked = compared("--model", tmp_path)
    assert said == f"4 vectors of {len(vectors[0])} numbers"
    assert np.abs(cosines - right).max() < 1e-5
    check_ranked(texts, query, ranked, cosines)
