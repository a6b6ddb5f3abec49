"""One configuration for every actor, which a process without torch can read."""

import pickle
import subprocess
import sys

import pytest

from nanoactor.model_files.files import read_model_files
from nanoactor.options.config import EngineConfig
from nanoactor.placement.topology import engine_topology
from nanoactor.setup.actors import ActorConfig
from tests.engine.conftest import DEMO

READ = """
import pickle, sys
config = pickle.load(sys.stdin.buffer)
assert not {"torch", "transformers"} & set(sys.modules)
sys.stdout.buffer.write(pickle.dumps(config))
"""


def demo_config(**options):
    engine = EngineConfig(str(DEMO), **options)
    return ActorConfig(engine, read_model_files(engine), bytes(range(16)))


@pytest.mark.parametrize("placement", ["default", "split", "single"])
def test_every_actor_is_given_the_same_configuration(placement):
    config = demo_config(placement=placement, num_tokenizers=2)
    specs = {spec.name: spec.config for spec in engine_topology(config).actors}
    runner = specs.pop("runner.0")
    assert (runner.shared, runner.rank) == (config, 0)
    assert len(specs) == 7
    assert all(given is config for given in specs.values())


def test_the_configuration_passes_between_processes_without_torch():
    config = demo_config(max_num_seqs=7, graph_cache_dir="graphs")
    sent = pickle.dumps(config)
    done = subprocess.run([sys.executable, "-c", READ], input=sent, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert pickle.loads(done.stdout) == config
