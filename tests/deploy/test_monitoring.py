"""Dashboards and alerts ask only for what the server exports, as its code declares it."""

import json
import re
import time
from types import SimpleNamespace

import pytest
import yaml

from nanoactor.fleet.monitor import FleetMonitor
from nanoactor.server.http import _OUTCOMES
from nanoactor.server.metrics import FINISHED_REASONS, Metrics
from nanoactor.server.monitor import Monitor
from tests.deploy.tools import DEPLOY, find, run

FOLDER = DEPLOY / "monitoring"
DASHBOARDS = {"engine": "grafana.json", "fleet": "grafana_fleet.json"}
SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "info": ("_info",)}
SCRAPES = {"instance", "job"}
"""Labels that Prometheus adds."""
OUTCOMES = {"ok", "4xx", "5xx", "broken_off", *_OUTCOMES.values()}


def engine():
    """The metrics of a server with one engine, which is not started."""
    llm = SimpleNamespace(
        dead=None,
        recovering=None,
        restarts=({}, 0.0),
        pids={"control": 1},
        config=SimpleNamespace(num_vision_workers=1),
    )
    metrics = Metrics("demo")
    monitor = Monitor(llm, metrics, 60.0)
    monitor._figures = {"scheduler": {}}
    monitor._heard_at = {"scheduler": time.monotonic_ns()}
    monitor._snapshots.append(monitor._make_snapshot({"scheduler": [0]}))
    return metrics


def fleet():
    """The metrics of an ingress, with one replica."""
    load = SimpleNamespace(running=0, waiting=0, waiting_tokens=0, free_blocks=1, is_reserved=False)
    hello = SimpleNamespace(facts={"num_blocks": 1, "pid": 1})
    replica = SimpleNamespace(
        name="a",
        figures={},
        last_report=time.monotonic(),
        link=SimpleNamespace(is_leaving=False),
        state=SimpleNamespace(load=load, streams=0, hello=hello),
    )
    counts = SimpleNamespace(moved=0, requeued=0, lost=0, deaths=0, poisoned=0)
    prefixes = SimpleNamespace(known_blocks=lambda name: 0)
    llm = SimpleNamespace(
        fleet=SimpleNamespace(
            replicas={"a": replica},
            links=SimpleNamespace(unconnected=[]),
            queue=SimpleNamespace(waiting=0),
            requests={},
            counts=counts,
            router=SimpleNamespace(prefixes=prefixes),
        )
    )
    metrics = Metrics("demo")
    metrics.engine_metrics = FleetMonitor(llm).collect
    return metrics


def exported(metrics):
    """Return the labels of each series that a server may export, by its name."""
    metrics.requests.labels("/v1/completions", "ok")
    metrics.turn_tokens.labels("reused")
    found = {}
    for family in metrics._registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            labels = {name for sample in family.samples for name in sample.labels}
            found[family.name + suffix] = labels | SCRAPES
    return found


EXPORTED = {"engine": exported(engine()), "fleet": exported(fleet())}
BOTH = {name: EXPORTED["engine"].get(name, set()) | labels for name, labels in {
    **EXPORTED["engine"], **EXPORTED["fleet"]}.items()}  # fmt: skip
WORDS = {
    "histogram_quantile", "rate", "increase", "deriv", "sum", "max", "min", "by", "and", "or", "le"
}  # fmt: skip


def check(query, known):
    """Check the names in a query, and their labels and values."""
    plain = re.sub(r"\$\w+", "1m", query)
    seen = set()
    for name, matchers in re.findall(r"\b([a-z][a-z0-9_]+)\b(\{[^}]*\})?", plain):
        if name in known:
            seen |= known[name]
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert label in known[name], (name, label)
                values = {"outcome": OUTCOMES, "finished_reason": set(FINISHED_REASONS)}
                assert value in values.get(label, {value}), (name, value)
    grouped = {name for part in re.findall(r"by \(([^)]*)\)", plain) for name in part.split(", ")}
    assert grouped <= seen, (query, grouped - seen)
    names = set(re.findall(r"\b[a-z][a-z0-9_]+\b", re.sub(r'\{[^}]*\}|"[^"]*"|\[\w+\]', "", plain)))
    assert names - known.keys() - WORDS - grouped == {*()}, query
    assert seen, query


def test_the_registry_is_read_as_the_server_writes_it():
    """The names that are looked up are those of the text at /metrics."""
    for metrics, known in ((engine(), EXPORTED["engine"]), (fleet(), EXPORTED["fleet"])):
        metrics.requests.labels("/v1/completions", "ok")
        lines = metrics.text().decode().splitlines()
        written = {re.split(r"[ {]", line)[0] for line in lines if not line.startswith("#")}
        assert written <= known.keys()
        assert len(written) > 40
    assert "nanoactor_replica_streams" not in EXPORTED["engine"]


@pytest.mark.parametrize("kind", DASHBOARDS)
def test_a_dashboard_asks_for_what_is_exported(kind):
    board = json.loads((FOLDER / DASHBOARDS[kind]).read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        check(query, EXPORTED[kind])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            inner, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
            check(inner, EXPORTED[kind])
            assert label in EXPORTED[kind][inner.partition("{")[0]]


@pytest.mark.parametrize("kind", DASHBOARDS)
def test_panels_have_their_own_places(kind):
    board = json.loads((FOLDER / DASHBOARDS[kind]).read_text())
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for name in ("id", "title"):
        found = [panel[name] for panel in board["panels"]]
        assert len(set(found)) == len(found)
    uids = {json.loads((FOLDER / name).read_text())["uid"] for name in DASHBOARDS.values()}
    assert len(uids) == len(DASHBOARDS)


def rules():
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported(rule):
    known = {**BOTH, "up": SCRAPES}
    check(rule["expr"], known)
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_each_alert_has_a_test():
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    tried = {}
    for one in tests:
        for case in one["alert_rule_test"]:
            tried.setdefault(case["alertname"], []).append(bool(case["exp_alerts"]))
    assert tried.keys() == {rule["alert"] for rule in rules()}
    assert all(any(fires) for fires in tried.values())


def test_a_name_that_is_not_exported_is_found():
    for wrong in (
        "rate(nanoactor_queue_request[5m])",
        "sum by (nodes) (nanoactor_up)",
        'nanoactor_requests_total{outcome="overload"}',
        'nanoactor_up{replica="a"}',
    ):
        with pytest.raises(AssertionError):
            check(wrong, EXPORTED["engine"])


@pytest.mark.skipif(find("promtool") is None, reason="promtool is missing (Debian's prometheus)")
def test_prometheus_accepts_the_plain_configuration():
    assert "1 rule files found" in run("promtool", "check", "config", FOLDER / "prometheus.yml")


def test_grafana_reads_the_dashboards_where_compose_puts_them():
    provisioning = FOLDER / "grafana_provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards.yml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasource.yml").read_text())["datasources"]
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    targets = [one.split(":")[1] for one in compose["grafana"]["volumes"]]
    boards = [target for target in targets if target.startswith(provider["options"]["path"])]
    assert len(boards) == len(DASHBOARDS)
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in boards
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"], "dashboards take the default source"
