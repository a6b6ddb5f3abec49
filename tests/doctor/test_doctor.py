"""What the doctor finds: on made-up machines, below a made-up root, and here."""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nanoactor.cli import main
from nanoactor.doctor import Finding, Machine, checks, examine
from nanoactor.doctor.ascend import driver_version
from nanoactor.doctor.finding import as_json, as_text
from nanoactor.doctor.machine import run_command
from nanoactor.doctor.probe import _devices

GIB = 1 << 30
TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
NPU_LINE = "{} Ascend910B3, 60.0 GiB of 64.0 GiB free"
GPU_LINE = "0 NVIDIA H200, 139.0 GiB of 140.0 GiB free"
SMI = """
| npu-smi 25.3.0                   Version: 25.3.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     910B3               | OK            | 93.4        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
| 1     910B3               | {health}| 93.4        40                0    / 0             |
"""
OK, ALARM = (SMI.format(health=f"{word:14}") for word in ("OK", "Alarm"))


@dataclasses.dataclass(frozen=True)
class Box:
    """What a made-up machine consists of."""

    files: Mapping[str, str]
    probe: Mapping[str, Any]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directories: tuple[str, ...] = ()
    smi: tuple[str, str] = ("", "")
    cut_short: str = ""
    python: tuple[int, int, int] = (3, 11, 7)
    host: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the host's own calls answer instead of what they do on a machine in order."""

    def changed(self, **changes: Any) -> "Box":
        """With other files, facts or variables; None takes away what is there."""
        for name, value in changes.items():
            if isinstance(value, dict):
                value = {**getattr(self, name), **value}
                changes[name] = {key: v for key, v in value.items() if v is not None}
        return dataclasses.replace(self, **changes)

    def machine(self, root: Path, calls: list[Any] | None = None) -> Machine:
        """Write its files, and have its programs answer."""
        for path, text in self.files.items():
            write(root, path, text)
        for path in self.directories:
            (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

        def run(command, environment, seconds):
            if calls is not None:
                calls.append((command, environment, seconds))
            if command[-1] == "info":
                return self.smi
            lines = [json.dumps({name: fact}) for name, fact in self.probe.items()]
            return "a library's banner\n3\n" + "\n".join(lines), self.cut_short

        return Machine(root, self.environment, run, self.python)


def write(root, path, text=""):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file


def pci(address, vendor, kind, node):
    facts = {"vendor": vendor, "class": kind, "numa_node": node}
    where = f"/sys/bus/pci/devices/{address}"
    return {f"{where}/{name}": f"{value}\n" for name, value in facts.items()}


NPU_CARD, NPU_CARD_1 = (pci("0000:c1:00.0", "0x19e5", "0x120000", node) for node in ("0", "1"))
GPU_CARD = pci("0000:17:00.0", "0x10de", "0x030200", "0")
TWO_NODES = ("/sys/devices/system/node/node0", "/sys/devices/system/node/node1")

CPU_BOX = Box(
    files={
        "/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx512_bf16 avx2\n",
        "/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\n",
    },
    probe={
        "triton_trouble": "PackageNotFoundError: triton",
        "torch_npu_trouble": "PackageNotFoundError: torch_npu",
        "torch": "2.13.0+cpu",
        "cuda_build": None,
        "gpus": [],
        "libascendcl_trouble": "OSError: libascendcl.so: cannot open shared object file",
        "libhccl_trouble": "OSError: libhccl.so: cannot open shared object file",
    },
)
GPU_BOX = CPU_BOX.changed(
    files={
        "/proc/driver/nvidia/version": "NVRM version: Kernel Module  580.95.05  x\n",
        "/dev/nvidia0": "",
        "/dev/nvidiactl": "",
    },
    probe={
        "torch": "2.13.0+cu130",
        "cuda_build": "13.0",
        "gpus": [[GPU_LINE, "ok"]],
        "triton": "3.7.0",
    },
)
NPU_BOX = CPU_BOX.changed(
    files={
        "/usr/local/Ascend/driver/version.info": "Version=25.3.0\nascendhal_version=7.35\n",
        "/usr/local/sbin/npu-smi": "",
        f"{TOOLKIT}/set_env.sh": "",
        **dict.fromkeys(("/dev/davinci0", "/dev/davinci1", *MANAGERS), ""),
    },
    directories=("/dev/shm", f"{TOOLKIT}/latest/opp"),
    probe={
        "torch_npu": "2.13.0.post1",
        "torch_npu_trouble": None,
        "npus": [[NPU_LINE.format(index), "ok"] for index in (0, 1)],
        "cann": "9.0.0",
        "libascendcl_trouble": None,
        "libhccl_trouble": None,
    },
    environment={
        "HOME": "/home/me",
        "PATH": "/usr/bin",
        "ASCEND_HOME_PATH": f"{TOOLKIT}/latest",
        "ASCEND_OPP_PATH": f"{TOOLKIT}/latest/opp",
    },
    smi=(OK, ""),
)


@pytest.fixture
def host(monkeypatch) -> Callable[[Box], None]:
    """Sets what a host's own calls answer."""

    def listen(address, taken):
        if address[1] in taken:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return types.SimpleNamespace(close=lambda: None)

    def set_to(box: Box) -> None:
        answers = {"files": (65536, 65536), "shm": 8 * GIB, "cores": 16, "taken": ()}
        answers |= box.host
        monkeypatch.setattr(resource, "getrlimit", lambda what: answers["files"])
        size = types.SimpleNamespace(total=answers["shm"])
        monkeypatch.setattr(shutil, "disk_usage", lambda path: size)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(answers["cores"])))
        listening = lambda address: listen(address, answers["taken"])  # noqa: E731
        monkeypatch.setattr(socket, "create_server", listening)

    return set_to


@pytest.fixture
def examined(tmp_path, host) -> Callable[[Box], list[Finding]]:
    """The findings on a made-up machine."""

    def examine_box(box: Box) -> list[Finding]:
        host(box)
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        return examine(box.machine(root))

    return examine_box


def named(findings, name):
    return [finding for finding in findings if finding.name == name]


def names(findings):
    return {finding.name for finding in findings}


@pytest.mark.parametrize("box", [CPU_BOX, GPU_BOX, NPU_BOX], ids=["cpu", "gpu", "npu"])
def test_a_machine_in_order_gives_neither_bad_nor_note(examined, box):
    assert [finding for finding in examined(box) if finding.state != "ok"] == []


def test_a_plain_cpu_says_in_one_line_that_there_is_no_npu(examined):
    findings = examined(CPU_BOX)
    assert [f.what for f in named(findings, "NPU")] == [
        "there is no NPU: no device, driver, CANN or torch_npu was found"
    ]
    assert not names(findings) & {"NPU driver", "device nodes", "CANN environment", "torch_npu"}
    assert not names(findings) & {"npu-smi", "shared memory", "Triton"}


def test_devices_are_told_with_their_memory(examined):
    (finding,) = named(examined(NPU_BOX), "NPU")
    assert finding.what == (
        "2: 0 Ascend910B3, 60.0 GiB of 64.0 GiB free; 1 Ascend910B3, 60.0 GiB of 64.0 GiB free; "
        "driver 25.3.0"
    )
    (finding,) = named(examined(GPU_BOX), "GPU")
    assert finding.what.startswith("1: 0 NVIDIA H200, 139.0 GiB of 140.0 GiB")
    assert finding.what.endswith("driver 580.95.05")


class Backend:
    """As `torch.cuda`, with a device for each answer about memory."""

    def __init__(self, *memory):
        self.memory = memory

    def is_available(self):
        return bool(self.memory)

    def device_count(self):
        return 8

    def get_device_name(self, index):
        return f"chip{index}"

    def mem_get_info(self, index):
        if isinstance(self.memory[index], Exception):
            raise self.memory[index]
        return self.memory[index]


def test_the_probe_judges_devices_by_their_memory():
    ill = RuntimeError("error 507033\nmore for its makers")
    backend = Backend((60 * GIB, 64 * GIB), (3 * GIB, 64 * GIB), ill)
    backend.device_count = lambda: 3
    assert _devices(backend) == [
        ("0 chip0, 60.0 GiB of 64.0 GiB free", "ok"),
        ("1 chip1, 3.0 GiB of 64.0 GiB free; other processes use most of it", "note"),
        ("2 chip2, RuntimeError: error 507033", "bad"),
    ]
    assert _devices(Backend()) == []


MOUNT = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
LOST = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
NO_HAL = "ImportError: libascend_hal.so: cannot open shared object file"
PAIR = "pip install '.[npu]' 'torch==2.13.0' 'torch_npu==2.13.0.*'"
NOTHING = dict.fromkeys(CPU_BOX.probe)
NO_DRIVER = {"/usr/local/Ascend/driver/version.info": None}
NO_NPUS = {"/dev/davinci0": None, "/dev/davinci1": None}
NO_TOOLKIT = {"ASCEND_HOME_PATH": None, "ASCEND_OPP_PATH": None}
FULL = ["1 Ascend910B3, 3.0 GiB of 64.0 GiB free; other processes use most of it", "note"]
NO_GPUS = {"gpus": []}
NO_TORCH_NPU = {"torch_npu": None, "torch_npu_trouble": "PackageNotFoundError: torch_npu"}


def broken_npu(trouble):
    """torch_npu as it is where it cannot be imported or used."""
    return NPU_BOX.changed(probe={"npus": None, "cann": None, "npus_trouble": trouble})


CASES = {
    "python too old": (CPU_BOX.changed(python=(3, 10, 1)), "Python", "bad", "python3.13 -m venv"),
    "python too new": (CPU_BOX.changed(python=(3, 14, 0)), "Python", "bad", "python3.13 -m venv"),
    "torch too old": (
        CPU_BOX.changed(probe={"torch": "2.9.1"}),
        "torch",
        "bad",
        "pip install 'torch>=2.11'",
    ),
    "no torch": (
        CPU_BOX.changed(
            probe={**NOTHING, "torch_trouble": "ModuleNotFoundError: No module named 'torch'"}
        ),
        "torch",
        "bad",
        "pip install 'torch>=2.11'",
    ),
    "a probe that says nothing": (CPU_BOX.changed(probe=NOTHING), "torch", "bad", "pip"),
    "a probe that hangs": (
        NPU_BOX.changed(probe={"npus": None, "cann": None}, cut_short="no answer within 60 s"),
        "probe",
        "bad",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -X faulthandler -c 'import torch, torch_npu'",
    ),
    "no driver": (
        NPU_BOX.changed(files=NO_DRIVER, probe={"npus": []}),
        "NPU driver",
        "bad",
        "install the NPU's driver",
    ),
    "no driver in a container": (
        NPU_BOX.changed(files=NO_DRIVER, probe={"npus": []}),
        "NPU driver",
        "bad",
        f"if this is a container, start it with {MOUNT}",
    ),
    "no NPU in /dev": (
        NPU_BOX.changed(files=NO_NPUS),
        "device nodes",
        "bad",
        f"docker run --device /dev/davinci0 {MOUNT}",
    ),
    "no NPU in a container": (
        NPU_BOX.changed(files={**NO_NPUS, **dict.fromkeys(MANAGERS)}),
        "device nodes",
        "bad",
        "if this is a container: docker run --device /dev/davinci0 --device "
        "/dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc -v",
    ),
    "one node missing": (
        NPU_BOX.changed(files={"/dev/hisi_hdc": None}),
        "device nodes",
        "bad",
        f"docker run --device /dev/hisi_hdc {MOUNT}",
    ),
    "no npu-smi": (
        NPU_BOX.changed(files={"/usr/local/sbin/npu-smi": None}),
        "npu-smi",
        "note",
        "npu-smi:ro",
    ),
    "npu-smi fails": (
        NPU_BOX.changed(smi=("", "ended with status 1: dcmi error")),
        "npu-smi",
        "bad",
        "npu-smi info",
    ),
    "an ill NPU": (NPU_BOX.changed(smi=(ALARM, "")), "npu-smi", "bad", "npu-smi info -t health"),
    "CANN not sourced": (
        NPU_BOX.changed(environment=NO_TOOLKIT, probe={"libhccl_trouble": f"OSError{LOST[11:]}"}),
        "CANN environment",
        "bad",
        f"source {TOOLKIT}/set_env.sh",
    ),
    "a script in a strange place": (
        NPU_BOX.changed(
            environment={**NO_TOOLKIT, "HOME": "/home/a b"},
            files={f"{TOOLKIT}/set_env.sh": None, "/home/a b/Ascend/cann/set_env.sh": ""},
        ),
        "CANN environment",
        "bad",
        "source '/home/a b/Ascend/cann/set_env.sh'",
    ),
    "CANN removed": (NPU_BOX.changed(directories=()), "CANN environment", "bad", "source"),
    "CANN that cannot be loaded": (
        NPU_BOX.changed(probe={"libascendcl_trouble": "OSError: libascendcl.so: no such file"}),
        "CANN environment",
        "bad",
        "source",
    ),
    "a path that is no path": (
        NPU_BOX.changed(environment={"ASCEND_HOME_PATH": "/" + 5000 * "x"}),
        "CANN environment",
        "bad",
        "source",
    ),
    "no CANN": (
        NPU_BOX.changed(environment=NO_TOOLKIT, files={f"{TOOLKIT}/set_env.sh": None}),
        "CANN environment",
        "bad",
        "install CANN",
    ),
    "no torch_npu": (NPU_BOX.changed(probe=NO_TORCH_NPU), "torch_npu", "bad", PAIR),
    "another torch_npu": (NPU_BOX.changed(probe={"torch_npu": "2.12.0"}), "torch_npu", "bad", PAIR),
    "another torch_npu of an old torch": (
        NPU_BOX.changed(probe={"torch_npu": "2.8.0", "torch": "2.9.0"}),
        "torch_npu",
        "bad",
        "pip install '.[npu]'",
    ),
    "torch_npu misses CANN": (broken_npu(LOST), "torch_npu", "bad", f"source {TOOLKIT}/set_env.sh"),
    "torch_npu misses the driver": (broken_npu(NO_HAL), "torch_npu", "bad", MOUNT),
    "torch_npu misses a module": (
        broken_npu("ModuleNotFoundError: No module named 'yaml'"),
        "torch_npu",
        "bad",
        "pip install yaml",
    ),
    "torch_npu fails": (
        broken_npu("RuntimeError: SetDevice, error code 507033"),
        "torch_npu",
        "bad",
        "import torch, torch_npu",
    ),
    "no NPU seen": (NPU_BOX.changed(probe={"npus": []}), "NPU", "bad", "npu-smi info"),
    "NPUs hidden": (
        NPU_BOX.changed(probe={"npus": []}, environment={"ASCEND_RT_VISIBLE_DEVICES": "7"}),
        "NPU",
        "bad",
        "unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    "an NPU whose memory is unknown": (
        NPU_BOX.changed(probe={"npus": [["0 Ascend910B3, RuntimeError: 507033", "bad"], FULL]}),
        "NPU",
        "bad",
        "npu-smi info",
    ),
    "a full NPU": (
        NPU_BOX.changed(probe={"npus": [[NPU_LINE.format(0), "ok"], FULL]}),
        "NPU",
        "note",
        "npu-smi info",
    ),
    "software alone": (
        CPU_BOX.changed(probe={"torch_npu": "2.13.0", "torch_npu_trouble": None}),
        "NPU driver",
        "bad",
        "pip uninstall torch_npu",
    ),
    "an NPU on the bus alone": (
        CPU_BOX.changed(files=NPU_CARD),
        "NPU",
        "note",
        "install the NPU's driver",
    ),
    "torch without CUDA": (
        GPU_BOX.changed(probe={**NO_GPUS, "cuda_build": None}),
        "GPU",
        "bad",
        "install a CUDA build of torch",
    ),
    "an old NVIDIA driver": (
        GPU_BOX.changed(probe={"gpus": None, "gpus_trouble": "RuntimeError: too old"}),
        "GPU",
        "bad",
        "update the driver",
    ),
    "GPUs hidden": (
        GPU_BOX.changed(probe=NO_GPUS, environment={"CUDA_VISIBLE_DEVICES": ""}),
        "GPU",
        "note",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a GPU without its driver": (
        CPU_BOX.changed(files=GPU_CARD),
        "GPU",
        "note",
        "docker run --gpus all",
    ),
    "a GPU that nobody asked": (GPU_BOX.changed(probe=NOTHING), "GPU", "note", "torch first"),
    "a full GPU": (
        GPU_BOX.changed(probe={"gpus": [["0 NVIDIA H200, 3.0 GiB of 140.0 GiB free", "note"]]}),
        "GPU",
        "note",
        "nvidia-smi",
    ),
    "an ill GPU": (
        GPU_BOX.changed(probe={"gpus": [["0 NVIDIA H200, AcceleratorError: 719", "bad"]]}),
        "GPU",
        "bad",
        "nvidia-smi",
    ),
    "no Triton": (GPU_BOX.changed(probe={"triton": None}), "Triton", "note", "pip install triton"),
    "no loopback": (
        CPU_BOX.changed(host={"taken": (0, 8000)}),
        "loopback",
        "bad",
        "ip link set lo up",
    ),
    "port taken": (CPU_BOX.changed(host={"taken": (8000,)}), "port 8000", "note", "--port 8001"),
    "small /dev/shm": (
        NPU_BOX.changed(host={"shm": 64 << 20}),
        "shared memory",
        "note",
        "--shm-size",
    ),
    "few files": (
        CPU_BOX.changed(host={"files": (1024, 65536)}),
        "open files",
        "note",
        "ulimit -n 65536",
    ),
    "few files, by force": (
        CPU_BOX.changed(host={"files": (1024, 4096)}),
        "open files",
        "note",
        "raise nofile",
    ),
    "one device, two nodes": (
        NPU_BOX.changed(files=NPU_CARD_1, directories=(*NPU_BOX.directories, *TWO_NODES)),
        "NUMA",
        "note",
        "numactl --cpunodebind=1 nanoactor serve",
    ),
    "devices on two nodes": (
        NPU_BOX.changed(
            files={**NPU_CARD_1, **GPU_CARD}, directories=(*NPU_BOX.directories, *TWO_NODES)
        ),
        "NUMA",
        "note",
        "keep runner processes near their device: numactl --cpunodebind=N",
    ),
    "a quota": (
        CPU_BOX.changed(files={"/sys/fs/cgroup/cpu.max": "350000 100000\n"}),
        "CPU quota",
        "note",
        "--threads 3",
    ),
    "a quota, older": (
        CPU_BOX.changed(
            files={
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "350000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            }
        ),
        "CPU quota",
        "note",
        "--threads 3",
    ),
    "no bfloat16": (
        CPU_BOX.changed(files={"/proc/cpuinfo": "flags : avx2\n"}),
        "CPU bfloat16",
        "note",
        "processor",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_wrong_is_said_with_its_fix(examined, case):
    box, name, state, fix = CASES[case]
    findings = examined(box)
    (finding,) = named(findings, name)
    assert finding.state == state
    assert fix in finding.fix
    assert finding.what
    # One fault may bring others: each says how it is fixed.
    assert all(f.fix for f in findings if f.state != "ok")


def test_closed_device_nodes_ask_for_the_group(examined, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: "davinci0" not in str(path))
    (finding,) = named(examined(NPU_BOX), "device nodes")
    assert finding.state == "bad"
    assert finding.what.endswith(" /dev/davinci0")
    assert "sudo usermod -aG HwHiAiUser $USER" in finding.fix


def test_what_does_not_matter_here_is_not_said(examined):
    quota = CPU_BOX.changed(files={"/sys/fs/cgroup/cpu.max": "1600000 100000\n"})
    assert "CPU quota" not in names(examined(quota))
    elsewhere = examined(NPU_BOX.changed(files=NO_DRIVER))
    assert all(finding.state == "ok" for finding in elsewhere)
    hung = examined(CASES["a probe that hangs"][0])
    assert not named(hung, "NPU")
    assert not named(hung, "torch_npu")
    mute = examined(NPU_BOX.changed(probe=dict.fromkeys(NPU_BOX.probe), cut_short="no answer"))
    assert not named(mute, "torch_npu")


def test_variables_that_hide_devices_are_shown(examined):
    box = NPU_BOX.changed(environment={"ASCEND_RT_VISIBLE_DEVICES": "0,1"})
    (finding,) = named(examined(box), "ASCEND_RT_VISIBLE_DEVICES")
    assert (finding.state, finding.what) == ("ok", "0,1")


# -- reading ------------------------------------------------------------------------------


def test_an_npu_server_is_read_from_its_files(tmp_path, host):
    cards = {
        **NPU_CARD_1,
        **pci("0000:01:00.0", "0x19e5", "0x120000", "-1"),
        **pci("0000:02:00.0", "0x19e5", "0x020000", "0"),  # a network card
        **pci("0000:03:00.0", "0x10de", "0x030200", "0"),
        **pci("0000:03:00.1", "0x10de", "0x040300", "0"),  # a GPU's sound
    }
    script = "/home/me/Ascend/ascend-toolkit/set_env.sh"
    box = NPU_BOX.changed(files={**cards, script: "", "/dev/davinci10": ""})
    host(box)
    calls: list[Any] = []
    machine = box.machine(tmp_path, calls)
    assert driver_version(machine) == "25.3.0"
    npus = [f"/dev/davinci{index}" for index in (0, 1, 10)]
    assert machine.files("/dev/davinci[0-9]*") == npus
    assert machine.cann_scripts == [f"{TOOLKIT}/set_env.sh", script]
    assert machine.pci == [
        ("NPU", "0000:01:00.0", "?"),
        ("GPU", "0000:03:00.0", "0"),
        ("NPU", "0000:c1:00.0", "1"),
    ]
    findings = examine(machine)
    states = {finding.name: finding.state for finding in findings}
    ascends_own = ("NPU driver", "device nodes", "npu-smi", "CANN environment", "CANN")
    assert {states[name] for name in (*ascends_own, "torch_npu", "NPU")} == {"ok"}
    (nodes,) = named(findings, "device nodes")
    assert nodes.what == ", ".join((*npus, *MANAGERS))
    environments = [environment for command, environment, _ in calls if command[-1] != "info"]
    assert [e["TORCH_DEVICE_BACKEND_AUTOLOAD"] for e in environments] == ["0"]
    assert all(seconds <= 60 for _, _, seconds in calls)


def test_an_environment_that_was_not_sourced_names_the_script_that_was_found(examined):
    script = "/home/me/Ascend/ascend-toolkit/set_env.sh"
    lost = broken_npu(LOST).changed(environment=NO_TOOLKIT, files={script: ""})
    for name in ("CANN environment", "torch_npu"):
        (finding,) = named(examined(lost), name)
        assert (finding.state, finding.fix) == ("bad", f"source {TOOLKIT}/set_env.sh")
    lost = lost.changed(files={f"{TOOLKIT}/set_env.sh": None})
    (finding,) = named(examined(lost), "torch_npu")
    assert finding.fix == f"source {script}"
    (finding,) = named(examined(lost.changed(environment={"HOME": None})), "torch_npu")
    assert finding.fix.startswith("install CANN")


@pytest.mark.parametrize("place", ["cann", "cann-9.0.0"])
def test_newer_layouts_of_cann_are_found(tmp_path, place):
    script = f"/usr/local/Ascend/{place}/set_env.sh"
    box = NPU_BOX.changed(files={f"{TOOLKIT}/set_env.sh": None, script: ""})
    assert box.machine(tmp_path).cann_scripts == [script]


def test_directories_and_libraries_that_are_not_there_are_named(examined):
    box = NPU_BOX.changed(
        environment={"ASCEND_HOME_PATH": "/opt/gone", "ASCEND_OPP_PATH": None},
        probe={"libhccl_trouble": CPU_BOX.probe["libhccl_trouble"]},
    )
    (finding,) = named(examined(box), "CANN environment")
    assert "/opt/gone, which does not exist" in finding.what
    assert "ASCEND_OPP_PATH is not set" in finding.what
    assert "libhccl.so: cannot open" in finding.what


def test_npu_smi_that_fails_or_sees_an_ill_device(examined):
    (finding,) = named(examined(NPU_BOX.changed(smi=(ALARM, ""))), "npu-smi")
    assert "not healthy: 1 910B3 | Alarm" in finding.what
    assert "0 910B3" not in finding.what
    late = NPU_BOX.changed(smi=("", "no answer within 10 s"))
    (finding,) = named(examined(late), "npu-smi")
    assert (finding.state, finding.what) == ("bad", "`npu-smi info`: no answer within 10 s")


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_containers_have_limits(examined, limit, used):
    box = CPU_BOX.changed(
        files={
            "/proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\n",
            f"/sys/fs/cgroup/{limit}": f"{2 * GIB}\n",
            f"/sys/fs/cgroup/{used}": f"{GIB}\n",
            "/sys/fs/cgroup/cpu.max": "max 100000\n",
        }
    )
    (finding,) = named(examined(box), "CPU")
    assert finding.what == "16 cores, 1.0 GiB of 2.0 GiB free"
    assert "CPU quota" not in names(examined(box))


def test_an_empty_root_is_read_without_an_error(tmp_path):
    machine = Machine(tmp_path, {}, lambda *_: ("", ""))
    assert not machine.expects_npu
    assert not machine.has_gpu
    bad = [finding.name for finding in examine(machine) if finding.state == "bad"]
    assert bad == ["torch"]


def test_a_port_that_is_taken():
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # somebody else has it
            stack.enter_context(socket.create_server(("127.0.0.1", 8000)))
        loopback, port = checks.network(Machine())
    assert loopback.state == "ok"
    assert (port.name, port.state) == ("port 8000", "note")
    assert "Address already in use" in port.what


@pytest.mark.parametrize("name", ["memfd_create", "eventfd"])
def test_rings_that_cannot_be_made_are_a_finding(examined, monkeypatch, name):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, name, refuse)
    (finding,) = named(examined(CPU_BOX), "rings")
    assert finding.state == "bad"
    assert "Operation not permitted" in finding.what
    assert "seccomp" in finding.fix
    assert len(os.listdir("/proc/self/fd")) == before


# -- other programs -----------------------------------------------------------------------


def test_a_program_that_hangs_is_ended_and_what_it_said_is_kept(tmp_path):
    def stuck(command, environment, seconds):
        said = json.dumps({"torch_npu": "2.13.0"})
        code = f"print({said!r}, flush=True); import time; time.sleep(60)"
        return run_command([sys.executable, "-c", code], environment, 1.0)

    start = time.monotonic()
    machine = Machine(tmp_path, {}, stuck)
    (finding,) = named(examine(machine), "probe")
    assert time.monotonic() - start < 50
    assert machine.probe["torch_npu"] == "2.13.0"
    assert finding.state == "bad"
    assert "no answer within 1 s" in finding.what


def test_a_program_that_crashes_fails_or_is_missing():
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert run_command([sys.executable, "-c", crash], {}, 20) == ("", "ended by signal 11")
    fail = "import sys; print('half'); sys.exit('no such chip')"
    said = run_command([sys.executable, "-c", fail], {}, 20)
    assert said == ("half\n", "ended with status 1: no such chip")
    _, missing = run_command(["/nowhere/npu-smi", "info"], {}, 20)
    assert missing == "cannot be run: No such file or directory"


def test_what_a_program_has_started_does_not_outlive_it(tmp_path):
    left = f"sleep 60 >/dev/null 2>&1 & echo $! > {tmp_path}/pid"
    assert run_command(["sh", "-c", left], dict(os.environ), 20) == ("", "")
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(200):
        if not status.exists() or ") Z " in status.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(status.read_text())


# -- here ---------------------------------------------------------------------------------


def doctor(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "nanoactor", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.skipif(Path("/dev/davinci_manager").exists(), reason="this machine has an NPU")
def test_this_machine_is_well_and_has_no_npu():
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "there is no NPU: no device, driver, CANN or torch_npu" in done.stdout
    assert "no problems" in done.stdout


def test_json_is_one_object_with_every_finding():
    done = doctor("--json")
    said = json.loads(done.stdout)
    assert said["ok"] is (done.returncode == 0)
    assert len(said["findings"]) > 8
    for finding in said["findings"]:
        assert set(finding) == {"name", "state", "what", "fix"}
        assert finding["state"] in ("ok", "note", "bad")
        assert bool(finding["fix"]) is (finding["state"] != "ok")


def test_what_is_bad_shows_in_the_exit_status(tmp_path):
    """torch_npu as it is where CANN was not sourced, by a stand-in."""
    write(tmp_path, "torch_npu/__init__.py", f"raise ImportError({LOST[13:]!r})")
    write(tmp_path, "torch_npu-2.13.0.dist-info/METADATA", "Name: torch_npu\nVersion: 2.13.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = doctor(PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "libhccl.so: cannot open shared object file" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_doctor_itself_imports_no_torch():
    code = (
        "import sys, nanoactor.cli, nanoactor.doctor as doctor\n"
        "doctor.examine(doctor.Machine())\n"
        "assert not {'torch', 'torch_npu', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=90, check=False)
    assert done.returncode == 0


def test_main_ends_with_the_status(monkeypatch, capsys, tmp_path, host):
    box = CASES["python too old"][0]
    host(box)
    monkeypatch.setattr("nanoactor.cli.Machine", lambda: box.machine(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "1 problem, 0 notes" in capsys.readouterr().out


def test_the_report():
    findings = [
        Finding("Python", "ok", "3.11.7"),
        Finding("open files", "note", "1024 at most", "ulimit -n 65536"),
    ]
    assert as_text(findings).splitlines() == [
        "ok    Python      3.11.7",
        "note  open files  1024 at most",
        "                  -> ulimit -n 65536",
        "",
        "no problems, 1 note",
    ]
    assert json.loads(as_json(findings))["ok"] is True
