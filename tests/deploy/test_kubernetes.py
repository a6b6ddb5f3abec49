"""The manifests, as kustomize renders them: Kubernetes' own schemas, and what must agree.

Kinds of operators are checked by what they contain: pod templates by Kubernetes' schemas,
`serveConfigV2` by Ray's. docs/production.md says what else was checked once.
"""

import importlib.util
import shutil
import sys
from types import SimpleNamespace

import pytest
import yaml

from nanoactor import EngineConfig
from tests.deploy.tools import (
    DEPLOY,
    EXIT_SECONDS,
    find,
    image_user,
    is_within,
    needs,
    run,
    served,
    written_folders,
)

FOLDER = DEPLOY / "kubernetes"
SERVERS = ("cpu", "nvidia", "ascend")
OF_OPERATORS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "RayService"}
KUSTOMIZE = find("kustomize") or find("kubectl")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (nanoactor[ray])"
)
pytestmark = [
    pytest.mark.skipif(KUSTOMIZE is None, reason="neither kustomize nor kubectl is installed"),
    # Ray warns of itself when it is imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    """The documents of each kustomization, with the key and the monitors that users add."""
    folder = tmp_path_factory.mktemp("manifests") / "kubernetes"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("api-key.env", "__pycache__"))
    for place in ("base", "fleet"):
        (folder / place / "api-key.env").write_text("key=secret\n")
    for name in SERVERS:
        path = folder / "overlays" / name / "kustomization.yaml"
        path.write_text(path.read_text() + "components: [../../components/monitoring]\n")
    fleet = folder / "fleet" / "kustomization.yaml"
    text = fleet.read_text()
    assert "  # - podmonitor.yaml\n" in text
    fleet.write_text(text.replace("  # - podmonitor.yaml\n", "  - podmonitor.yaml\n"))
    command = [] if "kustomize" in KUSTOMIZE else ["kustomize"]
    build = ["build"] if "kustomize" in KUSTOMIZE else []
    found = {}
    for name in (*(f"overlays/{name}" for name in SERVERS), "fleet"):
        text = run(KUSTOMIZE, *command, *build, folder / name)
        found[name.removeprefix("overlays/")] = list(yaml.safe_load_all(text))
    return found


@pytest.fixture(params=SERVERS)
def server(request, rendered):
    """(the overlay's name, its documents by kind.)"""
    return request.param, {one["kind"]: one for one in rendered[request.param]}


@pytest.fixture
def fleet(rendered):
    """The fleet's documents by kind."""
    return {one["kind"]: one for one in rendered["fleet"]}


def templates(documents):
    """(the name, the pod template) of each kind of pod."""
    if "Deployment" in documents:
        return [("deployment", documents["Deployment"]["spec"]["template"])]
    cluster = documents["RayService"]["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return [(name, group["template"]) for name, group in groups.items()]


@needs("kubernetes-validate")
@pytest.mark.parametrize("name", [*SERVERS, "fleet"])
def test_kubernetes_knows_every_field(rendered, name, tmp_path):
    documents = [one for one in rendered[name] if one["kind"] not in OF_OPERATORS]
    others = {one["kind"] for one in rendered[name]} - {one["kind"] for one in documents}
    assert others == ({"RayService", "PodMonitor"} if name == "fleet" else
                      {"ServiceMonitor", "PrometheusRule"})  # fmt: skip
    for pod, template in templates({one["kind"]: one for one in rendered[name]}):
        whole = {"metadata": {"name": pod}, "template": template}
        documents.append({"apiVersion": "v1", "kind": "PodTemplate", **whole})
    path = tmp_path / "documents.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    said = run("kubernetes-validate", "--strict", path)
    assert said.count(" passed ") == len(documents), said


@needs("kubernetes-validate")
def test_an_unknown_field_is_found(rendered, tmp_path):
    (deployment,) = [one for one in rendered["cpu"] if one["kind"] == "Deployment"]
    wrong = yaml.safe_load(yaml.safe_dump(deployment))
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(wrong))
    with pytest.raises(AssertionError, match="readOnlyRootFilesystem"):
        run("kubernetes-validate", "--strict", path)


def selects(selector, labels):
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and wanted.items() <= labels.items()


def test_selectors_find_the_pods(server, fleet):
    _, documents = server
    ((_, template),) = templates(documents)
    labels, spec = template["metadata"]["labels"], documents["Deployment"]["spec"]
    assert selects(spec["selector"], labels)
    assert selects(documents["Service"]["spec"]["selector"], labels)
    assert selects(documents["PodDisruptionBudget"]["spec"]["selector"], labels)
    (spread,) = template["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], labels)
    service = documents["Service"]
    monitor = documents["ServiceMonitor"]["spec"]
    assert selects(monitor["selector"], service["metadata"]["labels"])
    # The operator's `job` is the service's name, which NanoactorDown asks for.
    assert service["metadata"]["name"] == "nanoactor"
    (port,), (endpoint,) = service["spec"]["ports"], monitor["endpoints"]
    assert endpoint["port"] == port["name"]
    for _, template in templates(fleet):
        labels = template["metadata"]["labels"]
        assert selects(fleet["NetworkPolicy"]["spec"]["podSelector"], labels)
        assert selects(fleet["PodMonitor"]["spec"]["selector"], labels)


def names(documents, kind, key):
    """Each name of a ConfigMap or Secret that a document mentions."""
    found = []

    def look(node):
        if isinstance(node, dict):
            if isinstance(node.get(key), dict) and "name" in node[key]:
                found.append(node[key]["name"])
            for value in node.values():
                look(value)
        elif isinstance(node, list):
            for value in node:
                look(value)

    for one in documents:
        if one["kind"] != kind:
            look(one)
    return found


@pytest.mark.parametrize("name", [*SERVERS, "fleet"])
def test_names_with_a_hash_are_those_that_pods_ask_for(rendered, name):
    documents = rendered[name]
    for kind, key, least in (
        ("ConfigMap", "configMap", 1),
        ("Secret", "secretKeyRef", 1),
        ("Secret", "credentials", 1),
    ):
        (made,) = [one["metadata"]["name"] for one in documents if one["kind"] == kind]
        asked = names(documents, kind, key)
        assert len(asked) >= least
        assert set(asked) == {made}
        assert made.rsplit("-", 1)[0] in ("nanoactor", "nanoactor-fleet", "nanoactor-api-key")


@pytest.mark.parametrize("name", [*SERVERS, "fleet"])
def test_pods_have_no_privileges_and_write_only_to_volumes(rendered, name):
    for pod, template in templates({one["kind"]: one for one in rendered[name]}):
        spec, security = template["spec"], template["spec"]["securityContext"]
        assert security["runAsNonRoot"], pod
        user = image_user()
        assert [security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")] == [user] * 3
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        volumes = {one["name"]: one for one in spec["volumes"]}
        (container,) = spec["containers"]
        inner = container["securityContext"]
        assert inner["readOnlyRootFilesystem"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["capabilities"] == {"drop": ["ALL"]}
        mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert len(mounted) == len(volumes)
        writable = [path for path, one in mounted.items() if "configMap" not in one]
        assert all(is_within(folder, writable) for folder in written_folders())
        shm = mounted["/dev/shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert shm["sizeLimit"]
        assert container["resources"]["limits"]["memory"]
        assert container["image"] != "nanoactor", "an image needs a tag"
        assert container["image"].startswith("nanoactor:")


def options(documents):
    """The options that the server reads from its ConfigMap."""
    return yaml.safe_load(documents["ConfigMap"]["data"]["server.yaml"])


def test_the_server_accepts_its_options(server, tmp_path):
    name, documents = server
    path = tmp_path / "server.yaml"
    path.write_text(documents["ConfigMap"]["data"]["server.yaml"])
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["serve", "--config", "/etc/nanoactor/server.yaml"]
    engine, server_config = served(["serve", "--config", str(path)])
    assert engine.device == {"cpu": "cpu", "nvidia": "cuda", "ascend": "npu"}[name]
    (port,) = container["ports"]
    assert (server_config.host, server_config.port) == ("0.0.0.0", port["containerPort"])
    limits = container["resources"]["limits"]
    devices = [count for kind, count in limits.items() if "/" in kind]
    assert devices == ([] if name == "cpu" else [engine.tensor_parallel_size])
    assert container["resources"]["requests"].items() <= limits.items()


def test_probes_ask_what_they_are_for(server):
    ((_, template),) = templates(server[1])
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness")}
    assert all(one == {"path": "/ready", "port": port["name"]} for one in paths.values())
    assert container["livenessProbe"]["httpGet"] == {"path": "/live", "port": port["name"]}
    startup = container["startupProbe"]
    window = startup["periodSeconds"] * startup["failureThreshold"]
    assert window > EngineConfig("demo").start_timeout
    assert server[1]["Deployment"]["spec"]["progressDeadlineSeconds"] > window


def test_requests_drain_before_the_kubelet_kills(server):
    _, documents = server
    ((_, template),) = templates(documents)
    spec = template["spec"]
    (container,) = spec["containers"]
    program, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    drain = options(documents)["drain-timeout"]
    needed = int(pause) + drain + EXIT_SECONDS
    assert spec["terminationGracePeriodSeconds"] >= needed


def test_a_rollout_keeps_one_server(server):
    spec = server[1]["Deployment"]["spec"]
    rolling = spec["strategy"]["rollingUpdate"]
    assert spec["replicas"] - rolling["maxUnavailable"] >= 1
    assert rolling["maxUnavailable"] + rolling["maxSurge"] == 1
    assert server[1]["PodDisruptionBudget"]["spec"]["maxUnavailable"] < spec["replicas"]


def test_the_operators_rules_are_those_that_are_tested(server):
    groups = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())["groups"]
    assert server[1]["PrometheusRule"]["spec"]["groups"] == groups


def test_no_key_is_committed():
    for folder in ("base", "fleet"):
        assert "/api-key.env" in (FOLDER / folder / ".gitignore").read_text().splitlines()


# -- the fleet --------------------------------------------------------------------------


@pytest.fixture
def keyed(fleet, tmp_path, monkeypatch):
    """The module that the ConfigMap holds, imported as on a pod."""
    ((name, source),) = fleet["ConfigMap"]["data"].items()
    (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield name.removesuffix(".py")
    sys.modules.pop(name.removesuffix(".py"), None)


@needs_ray
def test_ray_accepts_the_application(fleet, keyed, monkeypatch):
    from ray.serve.schema import ServeDeploySchema

    from nanoactor.ray_serve.application import Arguments

    document = yaml.safe_load(fleet["RayService"]["spec"]["serveConfigV2"])
    made = ServeDeploySchema.model_validate(document)
    assert document.keys() <= ServeDeploySchema.model_fields.keys()  # it drops what it lacks
    (application,) = made.applications
    assert application.import_path == f"{keyed}:app"
    built = importlib.import_module(keyed)
    taken = []
    monkeypatch.setattr(built, "without_key", taken.append)
    monkeypatch.setenv("NANOACTOR_API_KEY", "secret")
    built.app(Arguments(**application.args))
    assert taken[0].server["api_keys"] == ["secret"]
    assert taken[0].server.items() > application.args["server"].items()
    monkeypatch.delenv("NANOACTOR_API_KEY")
    with pytest.raises(SystemExit, match="NANOACTOR_API_KEY is not set"):
        built.app(Arguments(**application.args))


@needs_ray
def test_the_application_is_built_with_the_key(fleet, keyed, monkeypatch):
    from nanoactor.ray_serve import application
    from nanoactor.ray_serve.application import Arguments

    monkeypatch.setenv("NANOACTOR_API_KEY", "secret")
    built = []
    original = application.build
    monkeypatch.setattr(application, "build", lambda *a: built.append(a) or original(*a))
    document = yaml.safe_load(fleet["RayService"]["spec"]["serveConfigV2"])
    arguments = document["applications"][0]["args"]
    assert importlib.import_module(keyed).app(Arguments(**{**arguments, "model": "demo"}))
    ((engine, server, options_of_fleet, _),) = built
    assert server.api_keys == ("secret",)
    assert (server.host, options_of_fleet.replicas) == ("0.0.0.0", arguments["replicas"])
    assert engine.device == "cuda"


def test_each_pod_of_the_fleet_has_what_it_serves(fleet):
    spec = fleet["RayService"]["spec"]
    cluster = spec["rayClusterConfig"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    asked = SimpleNamespace(**application["args"])
    workers = sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert asked.replicas == workers
    assert asked.ingresses == workers + 1, "a worker without an ingress would not be ready"
    grace = asked.server["drain_timeout"] + 30 + EXIT_SECONDS
    for name, template in templates(fleet):
        (container,) = template["spec"]["containers"]
        # KubeRay takes the service's port from this name.
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert ports["serve"] == asked.server["port"], name
        assert template["spec"]["terminationGracePeriodSeconds"] >= grace
        environment = {one["name"]: one for one in container["env"]}
        (folder,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config"]
        assert environment["PYTHONPATH"]["value"] == folder
    (worker,) = [t for name, t in templates(fleet) if name != "head"]
    probe = worker["spec"]["containers"][0]["readinessProbe"]
    assert probe["httpGet"] == {"path": "/ready", "port": "serve"}
    assert spec["excludeHeadPodFromServeSvc"]
    assert cluster["authOptions"] == {"mode": "token"}
    (endpoint,) = fleet["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "nanoactor"} in endpoint["relabelings"]


@needs_ray
def test_the_fleets_version_of_ray_is_the_one_that_is_installed(fleet):
    import ray

    wanted = fleet["RayService"]["spec"]["rayClusterConfig"]["rayVersion"]
    assert wanted.split(".")[:2] == ray.__version__.split(".")[:2]
