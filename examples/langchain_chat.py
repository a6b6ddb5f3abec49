"""LangChain on a nanoactor server: a chain, streamed, in batches, and with memory.

    nanoactor serve demo                       # in another terminal; or any other model
    pip install langchain langchain-openai
    python examples/langchain_chat.py

The server speaks OpenAI's API, so LangChain needs no integration of its own.
"""

import argparse

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_openai import ChatOpenAI
from openai import OpenAI


def main() -> None:
    """Run the chain in three ways."""
    parser = argparse.ArgumentParser(description="Run a chain of LangChain's.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the one that the server has")
    given = parser.parse_args()
    with OpenAI(base_url=given.url, api_key="none") as client:
        name = given.model or client.models.list().data[0].id

    # The server wants no key unless it was started with one; the package wants some text.
    # Parameters that OpenAI does not have go into `extra_body`, for example `top_k`.
    model = ChatOpenAI(
        model=name, base_url=given.url, api_key="none", max_tokens=60, extra_body={"top_k": 40}
    )
    prompt = ChatPromptTemplate.from_messages(
        [
            ("system", "You are {person}. Answer in one sentence."),
            MessagesPlaceholder("history"),
            ("human", "{question}"),
        ]
    )
    chain = prompt | model | StrOutputParser()

    print("--- a stream ---")
    first = {"person": "Romeo", "question": "Who is Juliet?", "history": []}
    text = ""
    for piece in chain.stream(first):
        text += piece
        print(piece, end="", flush=True)

    print("\n--- a second turn ---")
    # The model sees only what is sent. The server has the first turn in its prefix cache and
    # computes only what is new.
    history = [HumanMessage(first["question"]), AIMessage(text)]
    print(chain.invoke({"person": "Romeo", "question": "Where is she?", "history": history}))

    print("--- a batch ---")
    # `batch` sends the requests at the same time, and the server runs them in the same steps.
    people = ["Hamlet", "King Lear", "Ophelia"]
    asked = [{"person": p, "question": "What do you fear?", "history": []} for p in people]
    for person, said in zip(people, chain.batch(asked), strict=True):
        print(f"{person}: {said!r}")


if __name__ == "__main__":
    main()
