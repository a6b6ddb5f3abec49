"""An engine inside a web application of your own, with FastAPI.

    pip install 'nanoactor[examples]'
    python examples/fastapi_app.py
    curl -N http://127.0.0.1:8001/generate -H "Content-Type: application/json" \
        -d '{"prompt": "ROMEO:", "max_tokens": 40}'

If you only need OpenAI's API, `nanoactor serve` has it. This is for applications that do something
else with the engine, in the same process: their own routes, checks and answers.
"""

import argparse
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from nanoactor import (
    AsyncLLM,
    InvalidRequest,
    NanoactorError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)


class Ask(BaseModel):
    """The body of a request."""

    prompt: str
    max_tokens: Annotated[int, Field(ge=1)] = 64
    min_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: float = 0.8
    seed: int | None = None


def event(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(value)}\n\n"


async def events(
    first: RequestOutput, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncIterator[str]:
    """Yield a stream's pieces as events. A client that hangs up ends this generator, and
    `aclosing` aborts the request."""
    async with contextlib.aclosing(outputs):
        output = first
        try:
            while True:
                (answer,) = output.outputs
                yield event({"text": answer.text, "finish_reason": answer.finish_reason})
                output = await anext(outputs)
        except StopAsyncIteration:
            pass
        except NanoactorError as error:  # too late for a status: the head has been sent
            yield event({"error": str(error)})


def make_app(model: str) -> FastAPI:
    """Return the application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # The engine belongs to the event loop in which it was started. A lifespan runs in the same
        # loop as the routes, and ends when the application does. With `--workers N`, uvicorn would
        # start N engines.
        async with AsyncLLM(model) as llm:
            app.state.llm = llm
            yield

    app = FastAPI(lifespan=lifespan)

    @app.exception_handler(NanoactorError)
    async def refuse(request: Request, error: NanoactorError) -> JSONResponse:
        # What the caller did wrong is 400. All else, such as a full queue, may work later.
        status = 400 if isinstance(error, InvalidRequest) else 503
        return JSONResponse({"error": str(error)}, status)

    @app.post("/generate")
    async def generate(ask: Ask) -> StreamingResponse:
        params = SamplingParams(
            **ask.model_dump(exclude={"prompt"}), output_kind=RequestOutputKind.DELTA
        )
        outputs = app.state.llm.generate(ask.prompt, params)
        # Wait for the first piece here, so that a request that is refused gets a status.
        first = await anext(outputs)
        return StreamingResponse(events(first, outputs), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> JSONResponse:
        llm: AsyncLLM = app.state.llm
        if llm.dead is not None:
            return JSONResponse({"status": "dead", "error": str(llm.dead)}, 503)
        figures = (await llm.statistics())["scheduler"]["actor"]
        told = {"live": figures["live"], "aborted": figures["aborted"]}
        return JSONResponse({"status": "ok", **told})

    return app


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="Serve an application with an engine inside.")
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--port", type=int, default=8001)
    given = parser.parse_args()
    uvicorn.run(make_app(given.model), host="127.0.0.1", port=given.port)


if __name__ == "__main__":
    main()
