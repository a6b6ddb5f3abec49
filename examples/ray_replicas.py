"""Two engines on Ray behind one server; kill one, and its streams continue on the other.

    pip install 'nanoactor[ray]' openai
    python examples/ray_replicas.py
    python examples/ray_replicas.py --model Qwen/Qwen3-0.6B --replicas 4 --keep

`nanoactor serve MODEL --replicas 2` does the same without a program. This is for programs that
use Ray themselves: the replicas are an application of Ray Serve, next to whatever else the cluster
runs. Each replica asks Ray for a GPU if the cluster has some. docs/security.md says which ports Ray
opens.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import urllib.request
from typing import Any

import ray
from openai import AsyncOpenAI
from ray import serve

from nanoactor import EngineConfig
from nanoactor.ray_serve.application import build
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig

PROMPTS = ["ROMEO:\n", "JULIET:\n", "HAMLET:\n", "OPHELIA:\n", "LEAR:\n", "CORDELIA:\n"]


async def read(client: AsyncOpenAI, model: str, prompt: str, begun: asyncio.Event) -> str:
    """Return the text of one stream. `begun` is set at its first piece."""
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=300,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},  # so that no stream ends before the kill
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        begun.set()
    return text


def replicas(url: str) -> list[dict[str, Any]]:
    """Return the server's replicas: the process and the number of streams of each."""
    with urllib.request.urlopen(f"{url}/health") as reply:
        return list(json.load(reply)["actors"].values())


def moved(url: str) -> int:
    """Return how many streams the server has moved to another replica."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("nanoactor_fleet_moved_total ")]
    return int(float(line.split()[1]))


async def demonstrate(url: str, model: str) -> None:
    """Read streams twice: undisturbed, then while a replica dies."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:

        async def read_all(kill: bool) -> list[str]:
            events = [asyncio.Event() for _ in PROMPTS]
            async with asyncio.TaskGroup() as group:
                pairs = zip(PROMPTS, events, strict=True)
                tasks = [group.create_task(read(client, model, *pair)) for pair in pairs]
                await asyncio.gather(*(event.wait() for event in events))
                if kill:
                    found = await asyncio.to_thread(replicas, url)
                    busiest = max(found, key=lambda replica: replica["streams"])
                    print(f"killing process {busiest['pid']} with {busiest['streams']} streams")
                    # It is a process of this machine here; in a cluster it may be anywhere.
                    os.kill(busiest["pid"], signal.SIGKILL)
            return [task.result() for task in tasks]

        before, after = await read_all(kill=False), await read_all(kill=True)
    for prompt, one, other in zip(PROMPTS, before, after, strict=True):
        same = "the same text" if one == other else "another text"
        print(f"{prompt.strip():10} {len(other)} characters, {same} as undisturbed")
    print(f"streams moved: {await asyncio.to_thread(moved, url)}")


def main() -> None:
    """Start Ray and the application, use it, and stop both."""
    parser = argparse.ArgumentParser(description="Serve with several engines on Ray.")
    parser.add_argument("--model", default="demo", help="a directory, or a name on the hub")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ray-address", default="local", help='"auto" joins the running cluster')
    parser.add_argument("--keep", action="store_true", help="serve on until Ctrl-C")
    given = parser.parse_args()

    # "local" starts a Ray of this program's own. It needs a CPU for each replica, which the machine
    # may not have; Ray only counts them.
    own = given.ray_address == "local"
    cpus = max(os.cpu_count() or 1, given.replicas) if own else None
    ray.init(
        given.ray_address,
        num_cpus=cpus,
        include_dashboard=False if own else None,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        # The server in front of the engines is ours, so Ray Serve's own proxy stays off.
        serve.start(proxy_location="Disabled")
        application = build(
            # In float32 a stream that moves continues with exactly the same text. In bfloat16 what
            # was sent does not change, but the rest may round differently.
            EngineConfig(given.model, dtype="float32"),
            ServerConfig(port=given.port),
            FleetConfig(replicas=given.replicas),
        )
        serve.run(application, name="nanoactor", route_prefix=None)
        url = f"http://127.0.0.1:{given.port}"
        print(f"{given.replicas} replicas behind {url}")
        asyncio.run(demonstrate(url, given.model))
        if given.keep:
            print("Ctrl-C ends")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        serve.delete("nanoactor")
        ray.shutdown()


if __name__ == "__main__":
    main()
