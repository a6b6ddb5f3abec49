"""The unit, as systemd reads it. docs/production.md says what was run under systemd."""

import subprocess

import pytest

from nanoactor.cli import main
from tests.deploy.tools import DEPLOY, EXIT_SECONDS, find, image_environment, run, seconds, served

FOLDER = DEPLOY / "systemd"
EXPOSURE = 20
"""The most that `systemd-analyze security` may find, in tenths."""
needs_systemd = pytest.mark.skipif(
    find("systemd-analyze") is None, reason="systemd-analyze is missing (Debian's systemd)"
)


@pytest.fixture(scope="module")
def service():
    """The settings of the unit's [Service]: for each name, its values."""
    text = (FOLDER / "nanoactor.service").read_text().partition("\n[Service]\n")[2]
    found = {}
    for line in text.partition("\n[")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment():
    lines = (FOLDER / "nanoactor.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def expanded(command):
    """Return the words of ExecStart as systemd makes them: values are split at blanks."""
    words = []
    for word in command.split():
        words += environment()[word[1:]].split() if word.startswith("$") else [word]
    return words


@pytest.fixture
def installed(tmp_path):
    """The unit with its drop-in, where `nanoactor` is a program of this machine."""
    text = (FOLDER / "nanoactor.service").read_text()
    unit, drop_in = tmp_path / "nanoactor.service", tmp_path / "nanoactor.service.d"
    drop_in.mkdir()
    assert text.count("ExecStart=/opt/nanoactor/bin/nanoactor ") == 1
    unit.write_text(text.replace("ExecStart=/opt/nanoactor/bin/nanoactor ", "ExecStart=/bin/true "))
    return unit, drop_in


def complaints(unit):
    """What systemd says of the unit: of a setting that it does not know it warns, with status 0."""
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "nanoactor" in line]
    assert done.returncode == 0 or said, done.stderr
    return said


@needs_systemd
def test_systemd_accepts_the_unit(installed):
    unit, _ = installed
    assert complaints(unit) == []


@needs_systemd
def test_systemd_accepts_the_unit_for_gpus(installed):
    unit, drop_in = installed
    (drop_in / "nvidia.conf").write_text((FOLDER / "nvidia.conf").read_text())
    assert complaints(unit) == []


@needs_systemd
@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        ("KillMode=mixed", "KillMode=mixd", "mixd"),
        ("LockPersonality=", "LockPersonalities=", "LockPersonalities"),
    ],
)
def test_systemd_would_find_a_wrong_setting(installed, right, wrong, named):
    unit, _ = installed
    unit.write_text(unit.read_text().replace(right, wrong))
    assert any(named in one for one in complaints(unit))


@needs_systemd
def test_the_unit_is_hardened(installed):
    unit, _ = installed
    run("systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", unit)


def test_requests_drain_before_systemd_kills(service):
    (command,) = service["ExecStart"]
    engine, options = served(expanded(command)[1:])
    (limit,) = service["TimeoutStopSec"]
    assert seconds(limit) >= options.drain_timeout + EXIT_SECONDS
    assert engine.model == environment()["MODEL"]
    assert options.on_loopback, "without a key it must not be reachable"


def test_a_wrong_command_line_is_not_tried_again(service, capsys):
    assert service["Restart"] == ["on-failure"]
    with pytest.raises(SystemExit) as wrong:
        main(["serve", "demo", "--no-such-option"])
    capsys.readouterr()
    assert service["RestartPreventExitStatus"] == [str(wrong.value.code)]


def test_the_engine_and_not_systemd_replaces_processes(service):
    assert service["OOMPolicy"] == ["continue"]
    assert service["KillMode"] == ["mixed"]
    assert "MemoryDenyWriteExecute" not in service, "Numba writes code"


def test_caches_are_in_the_folder_that_the_unit_may_write(service):
    pairs = dict(pair.split("=", 1) for line in service["Environment"] for pair in line.split())
    assert pairs.keys() == image_environment().keys() - {"PATH"}
    assert all(value.startswith("/var/cache/nanoactor") for value in pairs.values())
    assert service["CacheDirectory"] == ["nanoactor"]
