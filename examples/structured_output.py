"""Make a model fill in an object: a JSON schema in, a Python object out.

    python examples/structured_output.py
    python examples/structured_output.py --model Qwen/Qwen3-0.6B --about "a robot who gardens"

The schema is not a request that the model may ignore. In each step only those tokens are allowed
that continue a valid document. Even the demo model, which has never seen JSON, follows it; what it
writes into the fields is another matter.
"""

import argparse
import dataclasses
import json

from nanoactor import LLM, SamplingParams


@dataclasses.dataclass
class Character:
    """What we want to have in the end."""

    name: str
    rank: str
    age: int
    friends: list[str]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,14}$"},
        "rank": {"enum": ["king", "knight", "merchant", "gardener"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        # Without `maxLength` and `maxItems`, a text or a list could go on until it is cut off.
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    # The model writes properties in the order above. Those that are not required may be left out.
    "required": ["name", "rank", "age", "friends"],
    "additionalProperties": False,
}


def ask(llm: LLM, about: str) -> Character:
    """Return a character that the model has made up."""
    params = SamplingParams(
        max_tokens=300,
        seed=1,
        structured_outputs={"json": SCHEMA, "disable_any_whitespace": True},
    )
    request = f"Describe {about}, a character in a play, as JSON that fits {json.dumps(SCHEMA)}"
    # The model does not see the schema that constrains it, so the prompt has to tell.
    (output,) = llm.chat([{"role": "user", "content": request}], params, use_tqdm=False)
    (answer,) = output.outputs
    # The one way to get an incomplete document: it was longer than `max_tokens`.
    if answer.finish_reason == "length":
        raise ValueError(f"the answer was cut off: {answer.text!r}")
    return Character(**json.loads(answer.text))


def main() -> None:
    """Read the command line, ask, and print the object."""
    parser = argparse.ArgumentParser(description="Make a model fill in an object.")
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--about", default="a friend of Juliet")
    given = parser.parse_args()
    with LLM(given.model) as llm:
        character = ask(llm, given.about)
    print(character)
    print(json.dumps(dataclasses.asdict(character)))


if __name__ == "__main__":
    main()
