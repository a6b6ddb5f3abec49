"""The names of Ray that are used exist, and mean what they are used for."""

import ast
import asyncio
import dataclasses
import inspect
import pickle
from types import SimpleNamespace

import pytest

from nanoactor import EngineConfig, InvalidConfig
from nanoactor.fleet.wire import Load
from nanoactor.ray_serve.options import FleetConfig
from nanoactor.server.config import ServerConfig
from tests.product_files import ROOT, matching

FLEET = FleetConfig(replicas=2)


def test_one_module_imports_ray():
    for path in matching("nanoactor/ray_serve/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" for name in names):
                assert path.name in ("api.py", "loopback.py"), path


def test_every_name_is_there():
    from nanoactor.ray_serve import api

    for name in api.__all__:
        assert getattr(api, name) is not None
    assert inspect.iscoroutinefunction(api.RequestRouter.choose_replicas)
    for name in ("update_replicas", "on_replica_actor_died", "curr_replicas"):
        assert hasattr(api.RequestRouter, name)
    fields = {field.name for field in dataclasses.fields(api.PendingRequest)}
    assert {"args", "future"} <= fields


def test_the_port_of_a_replica_can_be_bound_to_loopback(monkeypatch):
    from ray.serve._private import replica

    from nanoactor.ray_serve.loopback import LOOPBACK_VARIABLE, bind_to_loopback

    bound = []
    monkeypatch.setattr(replica, "add_port_to_grpc_server", lambda server, at: bound.append(at))
    monkeypatch.setenv(LOOPBACK_VARIABLE, "1")
    bind_to_loopback()
    bind_to_loopback()
    replica.add_port_to_grpc_server(None, "[::]:0")
    assert bound == ["127.0.0.1:0"]


def test_a_call_goes_to_the_replica_that_it_names():
    from nanoactor.ray_serve.members import ReplicaGone
    from nanoactor.ray_serve.router import ReplicaNameRouter

    class Named:
        def __init__(self, name):
            self.unique_id = name
            self.replica_id = self

    class Pending:
        def __init__(self, *args):
            self.args = args
            self.future = asyncio.get_running_loop().create_future()

    async def main():
        router, forgotten = ReplicaNameRouter.__new__(ReplicaNameRouter), []
        router._remove_pending_request_from_indices = forgotten.append
        one, two = Named("one"), Named("two")
        chosen = await ReplicaNameRouter.choose_replicas(router, [one, two], Pending("two", b""))
        assert chosen == [[two]]
        gone = Pending("three", b"")
        await ReplicaNameRouter.choose_replicas(router, [one, two], gone)
        with pytest.raises(ReplicaGone):
            await gone.future
        assert forgotten == [gone]

    asyncio.run(main())


def test_what_replicas_ask_ray_for(monkeypatch):
    from nanoactor.ray_serve import application

    config = EngineConfig("demo", device="cuda", tensor_parallel_size=4)
    assert application.resources(config, FLEET) == {"num_cpus": 1.0, "num_gpus": 4}
    config = EngineConfig("demo", device="npu", tensor_parallel_size=2)
    assert application.resources(config, FLEET) == {"num_cpus": 1.0, "resources": {"NPU": 2}}
    config = EngineConfig("demo", device="simulated:5")
    assert application.resources(config, FleetConfig(replicas=1, cpus_per_replica=3)) == {
        "num_cpus": 3
    }
    monkeypatch.setattr(application.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(application.ray, "cluster_resources", lambda: {"CPU": 8.0, "NPU": 8.0})
    config = EngineConfig("demo", tensor_parallel_size=8)
    assert application.resources(config, FLEET) == {"num_cpus": 1.0, "resources": {"NPU": 8}}


def test_the_typed_application_refuses_what_it_does_not_know():
    from pydantic import ValidationError

    from nanoactor.ray_serve.application import Arguments, app

    made = app(Arguments(model="demo", replicas=2, engine={"device": "simulated:5"}))
    assert made is not None
    with pytest.raises(ValidationError, match="extra"):
        Arguments(model="demo", replica=2)
    for wrong in (
        {"engine": {"devise": "cpu"}},
        {"server": {"prot": 1}},
        {"fleet": {"silence": 1}},
        {"replicas": -1},
        {"max_replicas": 1, "replicas": 2},
    ):
        with pytest.raises(InvalidConfig):
            app(Arguments(model="demo", **wrong))


def test_an_application_holds_its_secrets_but_does_not_show_them():
    from nanoactor.ray_serve.application import build

    salt = bytes(range(100, 132))
    config = EngineConfig("demo", device="simulated:5", prefix_salt=salt)
    made = build(config, ServerConfig(), FLEET)
    assert str(salt) not in repr(made)
    assert pickle.loads(pickle.dumps(config)).prefix_salt == salt


def test_replicas_are_asked_for_by_their_load():
    from nanoactor.ray_serve.scaling import by_demand, wanted_replicas

    assert [wanted_replicas(demand) for demand in (0, 0.5, 0.8, 0.81, 3.0)] == [1, 1, 1, 2, 4]
    load = Load(10, 30, 45_000, 0, 40, 0.0, is_reserved=False)
    assert FLEET.demand(load, 64) == 45_000 / 20_000
    assert FLEET.demand(load, 8) == 5.0

    context = SimpleNamespace(
        aggregated_metrics={"demand": {"a": 2.25, "b": 1.0}},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
    )
    assert by_demand(context) == (4, {})
    context.capacity_adjusted_max_replicas = 6
    assert by_demand(context) == (5, {})


WRONG = [
    {"replicas": -1},
    {"replicas": 1.5},
    {"replicas": True},
    {"replicas": 2, "max_replicas": 1},
    {"replicas": 2, "ingresses": 0},
    {"replicas": 2, "silence_timeout": 0.1},
    {"replicas": 2, "report_interval": "1"},
    {"replicas": 2, "cpus_per_replica": -1},
    {"replicas": 2, "ray_address": ""},
    {"replicas": 2, "target_waiting_tokens": 0},
    {"max_replicas": 3},
    {"ray_address": "auto"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_every_option_is_checked(options):
    with pytest.raises(InvalidConfig):
        FleetConfig(**options)


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    import importlib.util

    from nanoactor.ray_serve import launch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"pip install 'nanoactor\[ray\]'"):
        launch.check_ray()


def _documents():
    """The YAML documents of docs/scale_out.md."""
    text = (ROOT / "docs/scale_out.md").read_text()
    return [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]


def test_the_documented_configurations_are_valid():
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from nanoactor.ray_serve.application import Arguments, app

    config, manifest = map(yaml.safe_load, _documents())
    for document in (config, yaml.safe_load(manifest["spec"]["serveConfigV2"])):
        made = ServeDeploySchema.model_validate(document)
        assert document.keys() <= ServeDeploySchema.model_fields.keys()  # it drops what it lacks
        (application,) = made.applications
        assert application.import_path == "nanoactor.ray_serve.application:app"
        assert app(Arguments(**{**application.args, "model": "demo"})) is not None
