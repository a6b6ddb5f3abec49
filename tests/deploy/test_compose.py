"""The compose files, as Docker Compose reads them, and what their containers see."""

import json
import shutil
from pathlib import Path

import pytest

from tests.deploy.tools import (
    DEPLOY,
    EXIT_SECONDS,
    find,
    is_within,
    needs,
    run,
    seconds,
    served,
    written_folders,
)

FOLDER = DEPLOY / "compose"
VARIANTS = {"cpu": [], "cuda": ["compose.cuda.yaml"], "ascend": ["compose.ascend.yaml"]}
BOUND = {
    "server": set(),
    "prometheus": {"/etc/prometheus/prometheus.yml", "/etc/prometheus/alerts.yml"},
    "grafana": {
        "/etc/grafana/provisioning/datasources/nanoactor.yml",
        "/etc/grafana/provisioning/dashboards/nanoactor.yml",
        "/var/lib/grafana/dashboards/nanoactor.json",
        "/var/lib/grafana/dashboards/nanoactor_fleet.json",
    },
}
pytestmark = needs("docker-compose")


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    """(the target, the whole configuration.)"""
    files = [part for name in ["compose.yaml", *VARIANTS[request.param]] for part in ("-f", name)]
    variables = {"BASE_IMAGE": "cann"} if request.param == "ascend" else {}
    text = run("docker-compose", *files, "config", "--format", "json", cwd=FOLDER, env=variables)
    return request.param, json.loads(text)


def mounts(service, kind):
    return {one["target"]: one for one in service.get("volumes", []) if one["type"] == kind}


def test_the_files_that_containers_see_are_there(variant):
    _, config = variant
    assert config["services"].keys() == BOUND.keys()
    for name, service in config["services"].items():
        inside = {
            target: one
            for target, one in mounts(service, "bind").items()
            if Path(one["source"]).is_relative_to(DEPLOY)
        }
        assert inside.keys() == BOUND[name]
        for one in inside.values():
            assert Path(one["source"]).is_file(), one
            assert one["read_only"], one


def test_the_image_is_that_of_its_device(variant):
    target, config = variant
    build = config["services"]["server"]["build"]
    assert build["target"] == target
    assert Path(build["context"]) == DEPLOY.parent.parent
    assert (Path(build["context"]) / build["dockerfile"]).is_file()
    if target == "ascend":
        assert build["args"]["EXTRAS"] == "npu"
    if target == "cuda":
        (gpu,) = config["services"]["server"]["deploy"]["resources"]["reservations"]["devices"]
        assert (gpu["driver"], gpu["capabilities"]) == ("nvidia", ["gpu"])


def test_requests_drain_before_docker_kills(variant):
    server = variant[1]["services"]["server"]
    _, options = served(server["command"])
    assert seconds(server["stop_grace_period"]) >= options.drain_timeout + EXIT_SECONDS
    assert options.host == "0.0.0.0"
    assert server["restart"] == "unless-stopped"


def test_containers_can_do_little(variant):
    for name, service in variant[1]["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service["ports"]), name
        assert int(service["mem_limit"]) > 0, name
    server = variant[1]["services"]["server"]
    assert server["read_only"]
    (scratch,) = server["tmpfs"]
    writable = [*mounts(server, "volume"), scratch.partition(":")[0]]
    for folder in written_folders():
        assert is_within(folder, writable), folder


def test_keys_come_from_files_that_no_commit_has(variant):
    _, config = variant
    files = {Path(one["file"]).name: Path(one["file"]) for one in config["secrets"].values()}
    assert files.keys() == {"api_key", "grafana_password"}
    assert all(path.parent == FOLDER / "secrets" for path in files.values())
    assert "/secrets/" in (FOLDER / ".gitignore").read_text().splitlines()
    server = config["services"]["server"]
    assert server["environment"]["NANOACTOR_API_KEY_FILE"] == "/run/secrets/api_key"
    assert not any("KEY" in name and "FILE" not in name for name in server["environment"])


@pytest.mark.skipif(find("promtool") is None, reason="promtool is missing (Debian's prometheus)")
def test_prometheus_accepts_its_configuration(variant, tmp_path):
    """As its container sees it, below another root."""
    service = variant[1]["services"]["prometheus"]
    for target, one in mounts(service, "bind").items():
        copy = tmp_path / target.removeprefix("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(one["source"], copy)
    key = tmp_path / "key"
    key.write_text("secret")
    (flag,) = [one for one in service["command"] if one.startswith("--config.file=/")]
    config = tmp_path / flag.removeprefix("--config.file=/")
    text = config.read_text()
    assert "credentials_file: /run/secrets/api_key\n" in text
    config.write_text(text.replace("/run/secrets/api_key", str(key)))
    said = run("promtool", "check", "config", config)
    assert "1 rule files found" in said
