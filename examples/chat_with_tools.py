"""Chat with a model that may call functions of yours.

    nanoactor serve Qwen/Qwen3-4B          # in another terminal
    python examples/chat_with_tools.py     # ask: "What is in this folder?", "What is 17 * 23?"

The loop: send the conversation with a description of the functions; if the model answers with
calls, run them, append their results, and send it again; else print the answer. The demo model
(`nanoactor serve demo`) takes part, but never calls anything: use a model that was trained for it.
"""

import argparse
import datetime
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI

MOST_ROUNDS = 8
"""Rounds of calls for one question, as a model might call the same function forever."""


# A model may call a function with any arguments, so a function must do no harm whatever it is
# given: these only read, and only here.
def list_files(path: str = ".") -> list[str]:
    """Return the names of the files in a folder."""
    folder, here = Path(path).resolve(), Path.cwd()
    if not folder.is_relative_to(here):
        raise ValueError(f"{path} is outside of the working folder")
    return sorted(entry.name for entry in folder.iterdir())


def calculate(a: float, op: str, b: float) -> float:
    """Return the result of `a op b`."""
    known = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    return float(known[op](a, b))


def today() -> str:
    """Return the date."""
    return datetime.datetime.now().astimezone().strftime("%A, %d %B %Y")


def described(function: Callable[..., Any], what: str, **parameters: Any) -> Any:
    """Return the description of a function, as the model gets it."""
    schema = {"type": "object", "properties": parameters, "additionalProperties": False}
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": what,
            "parameters": {**schema, "required": list(parameters)},
            # The server then lets the model write only arguments that fit the schema.
            "strict": True,
        },
    }


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (list_files, calculate, today)
}
NUMBER = {"type": "number"}
TOOLS = [
    described(list_files, "List the files in a folder.", path={"type": "string"}),
    described(
        calculate, "Calculate `a op b`.", a=NUMBER, op={"enum": ["+", "-", "*", "/"]}, b=NUMBER
    ),
    described(today, "Get today's date."),
]


def call(name: str, arguments: str) -> str:
    """Run a function that the model has called. An error is a result too: the model reads it, and
    may try again."""
    try:
        if name not in FUNCTIONS:
            raise ValueError(f"there is no function {name}, only {', '.join(FUNCTIONS)}")
        result = FUNCTIONS[name](**json.loads(arguments))
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
    return json.dumps(result)


def answer(client: OpenAI, model: str, messages: list[Any]) -> str:
    """Return the model's answer, and append all that led to it to `messages`."""
    for _ in range(MOST_ROUNDS):
        done = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = done.choices[0].message
        # The calls become part of the conversation, and each result names the call it belongs to.
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for wanted in message.tool_calls:
            function = wanted.function
            result = call(function.name, function.arguments)
            print(f"  [{function.name}({function.arguments}) -> {result}]")
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": result})
    return f"(stopped after {MOST_ROUNDS} rounds of calls)"


def main() -> None:
    """Chat until the input ends."""
    parser = argparse.ArgumentParser(description="Chat with a model that may call functions.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the one that the server has")
    given = parser.parse_args()
    with OpenAI(base_url=given.url, api_key="none") as client:
        model = given.model or client.models.list().data[0].id
        messages: list[Any] = [{"role": "system", "content": "Use the tools where they help."}]
        print(f"You talk to {model}. End with Ctrl-D.")
        while True:
            print("> ", end="", flush=True)
            if not (line := sys.stdin.readline()):
                print()
                break
            messages.append({"role": "user", "content": line.strip()})
            print(answer(client, model, messages))


if __name__ == "__main__":
    main()
