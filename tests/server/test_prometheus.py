"""Figures by a real Prometheus: vLLM's dashboard has series for each query, and so has ours."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import httpx2 as httpx
import pytest

from nanoactor.server.vllm_metrics import NAMES
from tests.server.harness import here, url

MONITORING = Path(__file__).parents[2] / "examples" / "deploy" / "monitoring"
FAST = dict(device="simulated:1", placement="single")
PLAIN = {"prompt": "ROMEO:", "max_tokens": 4, "seed": 1}
needs = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="prometheus is not installed (Debian's package)"
)


def of_vllm():
    """The kinds of query in vLLM's dashboard, by panel (November 2026)."""
    of_model = '{model_name="demo"}'
    window = f"{of_model}[1m]"

    def quantile(name):
        return f"histogram_quantile(0.99, sum by(le) (rate(vllm:{name}_bucket{window})))"

    def increase(by, name):
        return f"sum by({by}) (increase(vllm:{name}{window}))"

    return {
        "E2E Request Latency": quantile("e2e_request_latency_seconds"),
        "Prompt Throughput": f"rate(vllm:prompt_tokens_total{window})",
        "Generation Throughput": f"rate(vllm:generation_tokens_total{window})",
        "Inter Token Latency": quantile("inter_token_latency_seconds"),
        "Running": f"vllm:num_requests_running{of_model}",
        "Waiting": f"vllm:num_requests_waiting{of_model}",
        "Time To First Token": quantile("time_to_first_token_seconds"),
        "Cache Utilization": f"vllm:kv_cache_usage_perc{of_model}",
        "Prompt Length": increase("le", "request_prompt_tokens_bucket"),
        "Generation Length": increase("le", "request_generation_tokens_bucket"),
        "Finish Reason": increase("finished_reason", "request_success_total"),
        "Queue Time": f"rate(vllm:request_queue_time_seconds_sum{window})",
        "Prefill Time": f"rate(vllm:request_prefill_time_seconds_sum{window})",
        "Decode Time": f"rate(vllm:request_decode_time_seconds_sum{window})",
        "Max Generation": f"rate(vllm:request_max_num_generation_tokens_sum{window})",
        "SLO": 'rate(vllm:time_to_first_token_seconds_bucket{model_name="demo",le="1.0"}[1m])',
        "Preemptions": f"rate(vllm:num_preemptions_total{window})",
        "Prefix hits": f"rate(vllm:prefix_cache_hits_total{window})",
    }


def of_ours():
    """The queries of our own dashboard."""
    found = {}
    for panel in json.loads((MONITORING / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$__range", "1m")
            found[panel["title"], target["refId"]] = query.replace("$instance", ".*")
    return found


@contextlib.contextmanager
def prometheus(path, port):
    """(the URL of one that scrapes a server on this port every second)."""
    config = path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs: [{job_name: nanoactor, static_configs: "
        f"[{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{own}"
        finally:
            process.terminate()


async def series(client, query):
    """How many series a query gives; none while Prometheus starts."""
    try:
        answer = await client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return 0
    return len(answer.json()["data"]["result"]) if answer.status_code == 200 else 0


async def all_found(client, queries, traffic):
    """The queries that give no series, once those that will have given some."""
    missing = dict(queries)
    for _ in range(60):
        await traffic()
        missing = {name: q for name, q in missing.items() if not await series(client, q)}
        if not missing:
            break
        await asyncio.sleep(0.5)
    return missing


@needs
def test_every_query_of_both_dashboards_gives_series(tmp_path):
    async def main():
        processes = {**FAST, "placement": "default"}
        async with here(config={"vllm_metrics": True}, **processes) as server:
            with prometheus(tmp_path, server.port) as address:
                async with (
                    httpx.AsyncClient(base_url=address) as client,
                    httpx.AsyncClient(base_url=url(server)) as user,
                ):

                    async def traffic():
                        answer = await user.post("/v1/completions", json=PLAIN)
                        assert answer.status_code == 200

                    missing = await all_found(client, of_vllm(), traffic)
                    assert missing == {}
                    assert await all_found(client, of_ours(), traffic) == {}
                    names = await client.get("/api/v1/label/model_name/values")
                    assert names.json()["data"] == ["demo"]

    asyncio.run(main())


@needs
@pytest.mark.parametrize(
    "command", [["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]]
)
def test_alerts_are_rules_that_do_as_they_say(command):
    done = subprocess.run(
        ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@needs
def test_figures_are_well_formed():
    async def main():
        async with (
            here(config={"vllm_metrics": True}, **FAST) as server,
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            await client.post("/v1/completions", json=PLAIN)
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    # It would have colons in recording rules alone, and no "_total" in a name of vLLM's.
    wrong = [line for line in done.stderr.splitlines() if not line.startswith("vllm:")]
    assert (done.returncode, wrong) in ((0, []), (3, [])), done.stderr
    for line in ("process_resident_memory_bytes ", 'nanoactor_info{model_name="demo",version='):
        assert line in text
    assert "_created" not in text


def ends(text):
    return {
        line.split('"')[1]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("nanoactor_request_success_total")
    }


def test_answers_are_counted_by_what_ended_them():
    async def main():
        async with (
            here(config={"vllm_metrics": True}, **FAST) as server,
            httpx.AsyncClient(base_url=url(server)) as client,
        ):
            before = (await client.get("/metrics")).text
            assert ends(before) == {"stop": 0, "length": 0, "abort": 0, "error": 0}
            await client.post("/v1/completions", json={**PLAIN, "n": 2})
            await client.post("/v1/completions", json={**PLAIN, "stop": ["a", "e", "o", "i", "\n"]})
            long = {**PLAIN, "max_tokens": 500, "stream": True, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=long) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                await lines.aclose()
            refused = await client.post("/v1/completions", json={**PLAIN, "temperature": -1})
            assert refused.status_code == 400
            far = {**PLAIN, "prompt": ["a " * 60_000] * 2, "n": 5}
            assert (await client.post("/v1/completions", json=far)).status_code == 400
            for _ in range(100):
                text = server.metrics.text().decode()
                if ends(text)["abort"]:
                    break
                await asyncio.sleep(0.05)
            found = ends(text)
            assert found["abort"] == 1
            assert found["stop"] + found["length"] == 3
            assert found["length"] >= 2
            assert found["error"] == 0, "what is refused is no answer"
            told = {
                line.split("{")[0].split()[0] for line in text.splitlines() if line[:5] == "vllm:"
            }
            for theirs in NAMES.values():
                assert any(name.startswith(f"vllm:{theirs}") for name in told), theirs

    asyncio.run(main())


def test_phases_of_a_request_are_timed():
    async def main():
        async with here(**FAST) as server:
            async with httpx.AsyncClient(base_url=url(server)) as client:
                await client.post("/v1/completions", json={**PLAIN, "n": 2, "max_tokens": 40})
            text = server.metrics.text().decode()
            assert not [line for line in text.splitlines() if line.startswith("vllm:")]
            figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")

            def summed(name):
                assert figures[f"nanoactor_{name}_count"] == "1.0", name
                return float(figures[f"nanoactor_{name}_sum"])

            phases = [summed(f"request_{p}_time_seconds") for p in ("prefill", "decode")]
            assert summed("request_inference_time_seconds") == pytest.approx(sum(phases))
            assert all(phase > 0 for phase in phases)
            assert summed("request_max_num_generation_tokens") == 40

    asyncio.run(main())
