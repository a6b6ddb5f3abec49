"""What the doctor finds: on made-up machines, below a made-up root, and here."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoactor.cli import main
from nanoactor.doctor import examine, look
from nanoactor.doctor.commands import Outcome, run_command
from nanoactor.doctor.finding import Finding
from nanoactor.doctor.machine import (
    MANAGERS,
    Ascend,
    Cpu,
    Device,
    Limits,
    Machine,
    Node,
    PciDevice,
    Ports,
    Smi,
    TorchFacts,
)
from nanoactor.doctor.report import as_json, as_text, is_well

GIB = 1 << 30
TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
NPU = Device("Ascend910B3", 60 * GIB, 64 * GIB)
GPU = Device("NVIDIA H200", 139 * GIB, 140 * GIB)
HOST = dict(
    python=(3, 11, 7),
    limits=Limits(shm=8 * GIB, open_files=65536, most_open_files=65536),
    cpu=Cpu(cores=16, memory=64 * GIB, available=60 * GIB, bfloat16=True),
)
CPU_BOX = Machine(torch=TorchFacts(version="2.13.0+cpu"), **HOST)
GPU_BOX = Machine(
    torch=TorchFacts(
        version="2.13.0+cu130", cuda_build="13.0", cuda_devices=(GPU,), triton="3.7.0"
    ),
    nvidia_driver="580.95.05",
    nvidia_nodes=("/dev/nvidia0",),
    **HOST,
)
NPU_BOX = Machine(
    torch=TorchFacts(
        version="2.13.0+cpu", npu_version="2.13.0.post1", npu_devices=(NPU, NPU), cann="9.0.0"
    ),
    ascend=Ascend(
        driver="25.3.0",
        firmware="7.8.0",
        npus=(Node("/dev/davinci0", True, True), Node("/dev/davinci1", True, True)),
        managers=tuple(Node(path, True, True) for path in MANAGERS),
        smi=Smi(2),
        home=f"{TOOLKIT}/latest",
        opp=f"{TOOLKIT}/latest/opp",
        missing_libraries=(),
        cann="9.0.0",
        scripts=(f"{TOOLKIT}/set_env.sh",),
    ),
    **HOST,
)


def changed(machine, **parts):
    """With `ascend_driver=None` for a field of a part, `python=...` for one of its own."""
    own = {field.name for field in dataclasses.fields(Machine)}
    for name, value in parts.items():
        if name in own:
            machine = dataclasses.replace(machine, **{name: value})
            continue
        part, _, field = name.partition("_")
        inner = dataclasses.replace(getattr(machine, part), **{field: value})
        machine = dataclasses.replace(machine, **{part: inner})
    return machine


def found(machine, name):
    return [finding for finding in examine(machine) if finding.name == name]


def names(machine):
    return {finding.name for finding in examine(machine)}


@pytest.mark.parametrize("machine", [CPU_BOX, GPU_BOX, NPU_BOX], ids=["cpu", "gpu", "npu"])
def test_a_machine_in_order_gives_neither_bad_nor_note(machine):
    assert [finding for finding in examine(machine) if finding.state != "ok"] == []


def test_a_plain_cpu_says_in_one_line_that_there_is_no_npu():
    assert [f.what for f in found(CPU_BOX, "NPU")] == [
        "there is none: no device, driver, CANN or torch_npu"
    ]
    assert not names(CPU_BOX) & {"NPU driver", "device nodes", "CANN environment", "torch_npu"}
    assert not names(CPU_BOX) & {"npu-smi", "HCCL ports", "shared memory", "Triton"}


def test_devices_are_told_with_their_memory():
    (finding,) = found(NPU_BOX, "NPU")
    assert finding.what == (
        "2: 0 Ascend910B3, 60.0 GiB of 64.0 GiB free; 1 Ascend910B3, 60.0 GiB of 64.0 GiB free"
    )
    (finding,) = found(GPU_BOX, "GPU")
    assert finding.what.startswith("1: 0 NVIDIA H200, 139.0 GiB of 140.0 GiB")
    assert finding.what.endswith("driver 580.95.05")


MOUNT = "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
CLOSED = tuple(Node(path, True, False) for path in MANAGERS)
NO_HDC = (*NPU_BOX.ascend.managers[:2], Node("/dev/hisi_hdc", False, False))
LOST = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"
NO_HAL = "ImportError: libascend_hal.so: cannot open shared object file"
PAIR = "pip install 'nanoactor[npu]' 'torch==2.13.0' 'torch_npu==2.13.0.*'"
ILL = dataclasses.replace(NPU, trouble="RuntimeError: error 507033", free=None, total=None)
FULL = Device("Ascend910B3", 3 * GIB, 64 * GIB)
FULL_GPU = Device("NVIDIA H200", 3 * GIB, 140 * GIB)
HIDDEN = {"ASCEND_RT_VISIBLE_DEVICES": "7"}

CASES = {
    "python too old": (CPU_BOX, dict(python=(3, 10, 1)), "Python", "bad", "python3.13 -m venv"),
    "python too new": (CPU_BOX, dict(python=(3, 14, 0)), "Python", "bad", "python3.13 -m venv"),
    "torch too old": (CPU_BOX, dict(torch_version="2.9.1"), "torch", "bad", "'torch>=2.11'"),
    "no torch": (
        CPU_BOX,
        dict(torch=TorchFacts(trouble="ModuleNotFoundError: No module named 'torch'")),
        "torch",
        "bad",
        "pip install 'torch>=2.11'",
    ),
    "a probe that says nothing": (CPU_BOX, dict(torch=TorchFacts()), "torch", "bad", "pip"),
    "a probe that hangs": (
        NPU_BOX,
        dict(torch_npu_devices=(), torch_cut_short="no answer within 60 s"),
        "probe",
        "bad",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -X faulthandler -c 'import torch, torch_npu'",
    ),
    "no driver": (
        NPU_BOX,
        dict(ascend_driver=None, torch_npu_devices=()),
        "NPU driver",
        "bad",
        "install",
    ),
    "no driver in a container": (
        NPU_BOX,
        dict(ascend_driver=None, torch_npu_devices=(), in_container=True),
        "NPU driver",
        "bad",
        f"start the container with {MOUNT}",
    ),
    "a driver elsewhere": (NPU_BOX, dict(ascend_driver=None), "NPU driver", "note", "nothing"),
    "no firmware": (NPU_BOX, dict(ascend_firmware=None), "NPU firmware", "note", "firmware"),
    "no NPU in /dev": (
        NPU_BOX,
        dict(ascend_npus=()),
        "device nodes",
        "bad",
        f"docker run --device /dev/davinci0 {MOUNT}",
    ),
    "no NPU in a container": (
        NPU_BOX,
        dict(ascend_npus=(), ascend_managers=Ascend().managers, in_container=True),
        "device nodes",
        "bad",
        "start the container with its devices: docker run --device /dev/davinci0 --device "
        "/dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc -v",
    ),
    "one node missing": (
        NPU_BOX,
        dict(ascend_managers=NO_HDC),
        "device nodes",
        "bad",
        f"docker run --device /dev/hisi_hdc {MOUNT}",
    ),
    "closed nodes": (
        NPU_BOX,
        dict(ascend_managers=CLOSED),
        "device nodes",
        "bad",
        "sudo usermod -aG HwHiAiUser $USER",
    ),
    "no npu-smi": (NPU_BOX, dict(ascend_smi=None), "npu-smi", "note", "npu-smi:ro"),
    "npu-smi fails": (
        NPU_BOX,
        dict(ascend_smi=Smi(0, (), "ended with status 1: dcmi error")),
        "npu-smi",
        "bad",
        "npu-smi info",
    ),
    "an ill NPU": (
        NPU_BOX,
        dict(ascend_smi=Smi(1, ("1 910B3 | Alarm | 93.4",))),
        "npu-smi",
        "bad",
        "npu-smi info -t health",
    ),
    "npu-smi without health": (NPU_BOX, dict(ascend_smi=Smi(0)), "npu-smi", "note", "npu-smi"),
    "CANN not sourced": (
        NPU_BOX,
        dict(ascend_home=None, ascend_opp=None, ascend_missing_libraries=("libhccl.so",)),
        "CANN environment",
        "bad",
        f"source {TOOLKIT}/set_env.sh",
    ),
    "a script in a strange place": (
        NPU_BOX,
        dict(ascend_home=None, ascend_scripts=("/home/a b/Ascend/cann/set_env.sh",)),
        "CANN environment",
        "bad",
        "source '/home/a b/Ascend/cann/set_env.sh'",
    ),
    "CANN removed": (
        NPU_BOX,
        dict(ascend_missing_directories=(f"{TOOLKIT}/latest",)),
        "CANN environment",
        "bad",
        "source",
    ),
    "no CANN": (
        NPU_BOX,
        dict(ascend_home=None, ascend_opp=None, ascend_scripts=()),
        "CANN environment",
        "bad",
        "install CANN",
    ),
    "CANN without a version": (
        NPU_BOX,
        dict(ascend_cann=None, torch_cann=None),
        "CANN",
        "note",
        "ASCEND_HOME_PATH",
    ),
    "no torch_npu": (NPU_BOX, dict(torch_npu_version=None), "torch_npu", "bad", PAIR),
    "another torch_npu": (NPU_BOX, dict(torch_npu_version="2.12.0"), "torch_npu", "bad", PAIR),
    "another torch_npu of an old torch": (
        NPU_BOX,
        dict(torch_npu_version="2.8.0", torch_version="2.9.0"),
        "torch_npu",
        "bad",
        "pip install 'nanoactor[npu]'",
    ),
    "torch_npu misses CANN": (
        NPU_BOX,
        dict(torch_npu_trouble=LOST, torch_npu_devices=()),
        "torch_npu",
        "bad",
        f"source {TOOLKIT}/set_env.sh",
    ),
    "torch_npu misses the driver": (
        NPU_BOX,
        dict(torch_npu_trouble=NO_HAL, torch_npu_devices=()),
        "torch_npu",
        "bad",
        MOUNT,
    ),
    "torch_npu misses a module": (
        NPU_BOX,
        dict(torch_npu_trouble="ModuleNotFoundError: No module named 'yaml'"),
        "torch_npu",
        "bad",
        "pip install yaml",
    ),
    "torch_npu fails": (
        NPU_BOX,
        dict(torch_npu_trouble="RuntimeError: SetDevice, error code 507033"),
        "torch_npu",
        "bad",
        "import torch, torch_npu",
    ),
    "no NPU seen": (NPU_BOX, dict(torch_npu_devices=()), "NPU", "bad", "npu-smi info"),
    "NPUs hidden": (
        NPU_BOX,
        dict(torch_npu_devices=(), visible=HIDDEN),
        "NPU",
        "bad",
        "unset ASCEND_RT_VISIBLE_DEVICES",
    ),
    "an NPU whose memory is unknown": (
        NPU_BOX,
        dict(torch_npu_devices=(ILL,)),
        "NPU",
        "bad",
        "npu-smi info",
    ),
    "a full NPU": (NPU_BOX, dict(torch_npu_devices=(NPU, FULL)), "NPU", "note", "npu-smi info"),
    "software alone": (
        CPU_BOX,
        dict(torch_npu_version="2.13.0"),
        "NPU",
        "note",
        "pip uninstall torch_npu",
    ),
    "an NPU on the bus alone": (
        CPU_BOX,
        dict(pci=(PciDevice("0000:c1:00.0", "NPU", 0),)),
        "NPU",
        "note",
        "install the NPU's driver",
    ),
    "torch without CUDA": (
        GPU_BOX,
        dict(torch_cuda_devices=(), torch_cuda_build=None),
        "GPU",
        "bad",
        "install a build for CUDA",
    ),
    "an old NVIDIA driver": (
        GPU_BOX,
        dict(torch_cuda_devices=(), torch_cuda_trouble="RuntimeError: too old"),
        "GPU",
        "bad",
        "update the driver",
    ),
    "GPUs hidden": (
        GPU_BOX,
        dict(torch_cuda_devices=(), visible={"CUDA_VISIBLE_DEVICES": ""}),
        "GPU",
        "note",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "a GPU without its driver": (
        CPU_BOX,
        dict(pci=(PciDevice("0000:17:00.0", "GPU", 0),)),
        "GPU",
        "note",
        "docker run --gpus all",
    ),
    "a GPU that nobody asked": (GPU_BOX, dict(torch=TorchFacts()), "GPU", "note", "torch first"),
    "a full GPU": (GPU_BOX, dict(torch_cuda_devices=(FULL_GPU,)), "GPU", "note", "nvidia-smi"),
    "an ill GPU": (
        GPU_BOX,
        dict(torch_cuda_devices=(dataclasses.replace(GPU, trouble="AcceleratorError: 719"),)),
        "GPU",
        "bad",
        "nvidia-smi",
    ),
    "no Triton": (GPU_BOX, dict(torch_triton=None), "Triton", "note", "pip install triton"),
    "no loopback": (
        CPU_BOX,
        dict(ports=Ports(loopback_trouble="Cannot assign requested address")),
        "loopback",
        "bad",
        "ip link set lo up",
    ),
    "port taken": (CPU_BOX, dict(ports_server_taken=True), "port 8000", "note", "--port 8001"),
    "HCCL's ports taken": (
        NPU_BOX,
        dict(ports_hccl_taken=(60000, 60001, 60007)),
        "HCCL ports",
        "note",
        "HCCL_HOST_SOCKET_PORT_RANGE=auto",
    ),
    "no port": (
        NPU_BOX,
        dict(ports_hccl_base="sixty"),
        "HCCL ports",
        "note",
        "unset HCCL_IF_BASE_PORT",
    ),
    "no rings": (
        CPU_BOX,
        dict(limits_rings_trouble="[Errno 1] Operation not permitted EPERM"),
        "rings",
        "bad",
        "seccomp",
    ),
    "small /dev/shm": (NPU_BOX, dict(limits_shm=64 << 20), "shared memory", "note", "--shm-size"),
    "few files": (CPU_BOX, dict(limits_open_files=1024), "open files", "note", "ulimit -n 65536"),
    "few files, by force": (
        CPU_BOX,
        dict(limits_open_files=1024, limits_most_open_files=4096),
        "open files",
        "note",
        "ulimit -n 4096; more: raise nofile",
    ),
    "locked memory, NPU": (
        NPU_BOX,
        dict(limits_locked=8 << 20),
        "locked memory",
        "note",
        "ulimit -l unlimited",
    ),
    "locked memory, GPU": (GPU_BOX, dict(limits_locked=0), "locked memory", "note", "memlock=-1"),
    "one device, two nodes": (
        NPU_BOX,
        dict(numa_nodes=2, pci=(PciDevice("0000:c1:00.0", "NPU", 1),)),
        "NUMA",
        "note",
        "numactl --cpunodebind=1 nanoactor serve MODEL",
    ),
    "devices on two nodes": (
        NPU_BOX,
        dict(
            numa_nodes=2,
            pci=(PciDevice("0000:01:00.0", "NPU", 0), PciDevice("0000:c1:00.0", "NPU", 1)),
        ),
        "NUMA",
        "note",
        "runner processes are best bound near their device: numactl --cpunodebind=N",
    ),
    "a quota": (CPU_BOX, dict(cpu_quota=3.5), "CPU quota", "note", "--threads 3"),
    "no bfloat16": (CPU_BOX, dict(cpu_bfloat16=False), "CPU bfloat16", "note", "processor"),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_wrong_is_said_with_what_mends_it(case):
    machine, parts, name, state, mend = CASES[case]
    (finding,) = found(changed(machine, **parts), name)
    assert finding.state == state
    assert mend in finding.mend
    assert finding.what
    # One fault may bring others: each says how it is mended.
    assert all(f.mend for f in examine(changed(machine, **parts)) if f.state != "ok")


def test_what_does_not_matter_here_is_not_said():
    assert "locked memory" not in names(changed(CPU_BOX, limits_locked=8 << 20))
    assert "NPU firmware" not in names(changed(NPU_BOX, ascend_firmware=None, in_container=True))
    quota = changed(CPU_BOX, cpu_quota=16.0)
    assert "CPU quota" not in names(quota)
    assert "HCCL ports" not in names(changed(GPU_BOX, ports_hccl_taken=(60000,)))
    (range_,) = found(
        changed(NPU_BOX, ports_hccl_range="auto", ports_hccl_taken=(1,)), "HCCL ports"
    )
    assert range_.state == "ok"
    hung = changed(NPU_BOX, torch_npu_devices=(), torch_cut_short="no answer within 60 s")
    assert not found(hung, "NPU")
    assert not found(hung, "torch_npu")


def test_variables_that_hide_devices_are_shown():
    machine = changed(NPU_BOX, visible={"ASCEND_RT_VISIBLE_DEVICES": "0,1"})
    (finding,) = found(machine, "ASCEND_RT_VISIBLE_DEVICES")
    assert (finding.state, finding.what) == ("ok", "0,1")


# -- reading ------------------------------------------------------------------------------


def write(root, path, text=""):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


PROBED = [
    {"triton": None, "npu_version": "2.13.0"},
    {"version": "2.13.0+cpu"},
    {"cuda_build": None},
    {"cuda_devices": []},
    {"npu_devices": [{"name": "Ascend910B3", "free": 1, "total": 2}]},
    {"cann": "9.0.0"},
]
SMI = """
| npu-smi 25.3.0                   Version: 25.3.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| 0     910B3               | OK            | 93.4        40                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3161 / 65536         |
| 1     910B3               | {health}| 93.4        40                0    / 0             |
"""


def answers(probe=PROBED, smi="", trouble="", calls=None):
    """In place of running programs."""

    def run(command, environment, seconds):
        if calls is not None:
            calls.append((command, environment, seconds))
        if command[-1] == "info":
            return Outcome(smi, trouble)
        return Outcome("a library's banner\n3\n" + "\n".join(map(json.dumps, probe)), "")

    return run


@pytest.fixture
def server(tmp_path):
    """The files of a machine with two NPUs, CANN sourced."""
    write(
        tmp_path,
        "/usr/local/Ascend/driver/version.info",
        "Version=25.3.rc1\nascendhal_version=7.35\npackage_version=25.3.0\n",
    )
    write(tmp_path, "/usr/local/Ascend/firmware/version.info", "Version=7.8.0.2.212\n")
    for path in ("/dev/davinci0", "/dev/davinci10", "/dev/davinci2", *MANAGERS):
        write(tmp_path, path)
    (tmp_path / "dev/shm").mkdir()
    write(tmp_path, "/usr/local/sbin/npu-smi")
    write(tmp_path, f"{TOOLKIT}/set_env.sh")
    write(tmp_path, "/home/me/Ascend/ascend-toolkit/set_env.sh")
    info = "package_name=Ascend-cann-toolkit\nversion=9.0.0\ninnerversion=V100\n"
    write(tmp_path, f"{TOOLKIT}/latest/aarch64-linux/ascend_toolkit_install.info", info)
    (tmp_path / f"{TOOLKIT}/latest/opp".lstrip("/")).mkdir()
    for library in ("libascendcl.so", "libhccl.so"):
        write(tmp_path, f"{TOOLKIT}/latest/lib64/{library}")
    for node in (0, 1):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    write(tmp_path, "/sys/devices/system/node/online", "0-1")
    add_pci(tmp_path, "0000:c1:00.0", "0x19e5", "0x120000", "1")
    add_pci(tmp_path, "0000:01:00.0", "0x19e5", "0x120000", "-1")
    add_pci(tmp_path, "0000:02:00.0", "0x19e5", "0x020000", "0")  # a network card
    add_pci(tmp_path, "0000:03:00.0", "0x10de", "0x030200", "0")
    add_pci(tmp_path, "0000:03:00.1", "0x10de", "0x040300", "0")  # a GPU's sound
    return tmp_path


def add_pci(root, address, vendor, kind, node):
    for name, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
        write(root, f"/sys/bus/pci/devices/{address}/{name}", value + "\n")


SOURCED = {
    "HOME": "/home/me",
    "PATH": "/usr/bin",
    "ASCEND_HOME_PATH": f"{TOOLKIT}/latest",
    "ASCEND_OPP_PATH": f"{TOOLKIT}/latest/opp",
    "LD_LIBRARY_PATH": f"/nowhere::{TOOLKIT}/latest/lib64",
    "ASCEND_RT_VISIBLE_DEVICES": "0",
}


def test_an_npu_server_is_read_from_its_files(server):
    calls = []
    machine = look(server, SOURCED, answers(smi=SMI.format(health="OK            "), calls=calls))
    ascend = machine.ascend
    assert (ascend.driver, ascend.firmware, ascend.cann) == ("25.3.0", "7.8.0.2.212", "9.0.0")
    assert [n.path for n in ascend.npus] == ["/dev/davinci0", "/dev/davinci2", "/dev/davinci10"]
    assert all(node.present and node.usable for node in (*ascend.npus, *ascend.managers))
    assert ascend.smi == Smi(2)
    assert (ascend.missing_directories, ascend.missing_libraries) == ((), ())
    assert ascend.scripts == (
        f"{TOOLKIT}/set_env.sh",
        "/home/me/Ascend/ascend-toolkit/set_env.sh",
    )
    assert machine.numa_nodes == 2
    assert machine.pci == (
        PciDevice("0000:01:00.0", "NPU", None),
        PciDevice("0000:03:00.0", "GPU", 0),
        PciDevice("0000:c1:00.0", "NPU", 1),
    )
    assert machine.visible == {"ASCEND_RT_VISIBLE_DEVICES": "0"}
    assert machine.torch.npu_devices == (Device("Ascend910B3", 1, 2),)
    assert not machine.in_container
    ascends_own = {"NPU driver", "NPU firmware", "device nodes", "npu-smi", "CANN environment"}
    states = {finding.name: finding.state for finding in examine(machine)}
    assert {states[name] for name in (*ascends_own, "CANN", "torch_npu", "NPU")} == {"ok"}
    environments = [environment for command, environment, _ in calls if command[-1] != "info"]
    assert [e["TORCH_DEVICE_BACKEND_AUTOLOAD"] for e in environments] == ["0"]
    assert all(seconds <= 60 for _, _, seconds in calls)


def test_an_environment_that_was_not_sourced_names_the_script_that_was_found(server):
    lost = [*PROBED[:4], {"npu_trouble": LOST}]
    machine = look(server, {"HOME": "/home/me"}, answers(lost))
    for name in ("CANN environment", "torch_npu"):
        (finding,) = found(machine, name)
        assert (finding.state, finding.mend) == ("bad", f"source {TOOLKIT}/set_env.sh")
    shutil.rmtree(server / "usr/local/Ascend/ascend-toolkit")
    (finding,) = found(look(server, {"HOME": "/home/me"}, answers(lost)), "torch_npu")
    assert finding.mend == "source /home/me/Ascend/ascend-toolkit/set_env.sh"
    (finding,) = found(look(server, {}, answers(lost)), "torch_npu")
    assert finding.mend.startswith("install CANN")


@pytest.mark.parametrize("place", ["cann", "cann-9.0.0"])
def test_newer_layouts_of_cann_are_found(server, place):
    shutil.rmtree(server / "usr/local/Ascend/ascend-toolkit")
    write(server, f"/usr/local/Ascend/{place}/set_env.sh")
    scripts = look(server, {}, answers()).ascend.scripts
    assert scripts == (f"/usr/local/Ascend/{place}/set_env.sh",)


def test_directories_and_libraries_that_are_not_there_are_named(server):
    environment = {"ASCEND_TOOLKIT_HOME": "/opt/gone", "LD_LIBRARY_PATH": "/opt/gone/lib64"}
    ascend = look(server, environment, answers()).ascend
    assert ascend.missing_directories == ("/opt/gone",)
    assert ascend.missing_libraries == ("libascendcl.so", "libhccl.so")
    (finding,) = found(look(server, environment, answers()), "CANN environment")
    assert "/opt/gone does not exist" in finding.what
    assert "no libascendcl.so and no libhccl.so" in finding.what


def test_the_version_of_cann_in_its_older_file(server):
    (server / TOOLKIT.lstrip("/") / "latest/aarch64-linux/ascend_toolkit_install.info").unlink()
    text = "# version: 1.0\nruntime_running_version=[7.7.0.1.238:8.2.RC1]\n"
    write(server, f"{TOOLKIT}/latest/version.cfg", text)
    assert look(server, SOURCED, answers()).ascend.cann == "8.2.RC1"


def test_npu_smi_that_fails_or_sees_an_ill_device(server):
    ill = look(server, SOURCED, answers(smi=SMI.format(health="Alarm         "))).ascend.smi
    assert ill.healthy == 1
    assert ill.unhealthy[0].startswith("1 910B3 | Alarm")
    late = look(server, SOURCED, answers(trouble="no answer within 10 s"))
    (finding,) = found(late, "npu-smi")
    assert (finding.state, finding.what) == ("bad", "`npu-smi info`: no answer within 10 s")


def test_containers_and_their_limits(tmp_path):
    write(tmp_path, "/.dockerenv")
    write(tmp_path, "/proc/meminfo", "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\n")
    write(tmp_path, "/sys/fs/cgroup/memory.max", "2147483648\n")
    write(tmp_path, "/sys/fs/cgroup/memory.current", "1073741824\n")
    write(tmp_path, "/sys/fs/cgroup/cpu.max", "150000 100000\n")
    write(tmp_path, "/proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu avx512_bf16 avx2\n")
    write(tmp_path, "/proc/driver/nvidia/version", "NVRM version: Kernel Module  580.95.05  x\n")
    write(tmp_path, "/dev/nvidia0")
    write(tmp_path, "/dev/nvidiactl")
    machine = look(tmp_path, {}, answers([]))
    assert machine.in_container
    assert (machine.cpu.memory, machine.cpu.available) == (2 * GIB, GIB)
    assert (machine.cpu.quota, machine.cpu.bfloat16) == (1.5, True)
    assert (machine.nvidia_driver, machine.nvidia_nodes) == ("580.95.05", ("/dev/nvidia0",))
    write(tmp_path, "/sys/fs/cgroup/cpu.max", "max 100000\n")
    assert look(tmp_path, {}, answers([])).cpu.quota is None


def test_an_empty_root_is_read_without_an_error(tmp_path):
    machine = look(tmp_path, {}, answers([]))
    assert not machine.wants_npu
    assert not machine.wants_gpu
    assert machine.limits.shm is None
    assert [finding.name for finding in examine(machine) if finding.state == "bad"] == ["torch"]


def test_ports_that_are_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        machine = look(tmp_path, {"HCCL_IF_BASE_PORT": str(port)}, answers())
        assert port in machine.ports.hccl_taken
        # Also at the end of all ports, and where it is no number.
        look(tmp_path, {"HCCL_IF_BASE_PORT": "65530"}, answers())
        assert look(tmp_path, {"HCCL_IF_BASE_PORT": "x"}, answers()).ports.hccl_taken == ()


@pytest.mark.parametrize("name", ["memfd_create", "eventfd"])
def test_rings_that_cannot_be_made_are_a_finding(tmp_path, monkeypatch, name):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, name, refuse)
    (finding,) = found(look(tmp_path, {}, answers()), "rings")
    assert finding.state == "bad"
    assert "EPERM" in finding.what
    assert len(os.listdir("/proc/self/fd")) == before


# -- other programs -----------------------------------------------------------------------


def test_a_program_that_hangs_is_ended_and_what_it_said_is_kept(tmp_path):
    def stuck(command, environment, seconds):
        if command[-1] == "info":
            return Outcome("")
        said = json.dumps({"triton": None, "npu_version": "2.13.0"})
        code = f"print({said!r}, flush=True); import time; time.sleep(60)"
        return run_command([sys.executable, "-c", code], environment, 1.0)

    start = time.monotonic()
    machine = look(tmp_path, {}, stuck)
    assert time.monotonic() - start < 50
    assert machine.torch.npu_version == "2.13.0"
    (finding,) = found(machine, "probe")
    assert finding.state == "bad"
    assert "no answer within 1 s" in finding.what


def test_a_program_that_crashes_fails_or_is_missing():
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert run_command([sys.executable, "-c", crash], {}, 20).trouble == "ended by signal 11"
    fail = "import sys; sys.exit('no such chip')"
    said = run_command([sys.executable, "-c", fail], {}, 20).trouble
    assert said == "ended with status 1: no such chip"
    missing = run_command(["/nowhere/npu-smi", "info"], {}, 20)
    assert missing.trouble == "cannot be run: No such file or directory"


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
    assert "there is none: no device, driver, CANN or torch_npu" in done.stdout
    assert "nothing bad" in done.stdout


def test_json_is_one_object_with_every_finding():
    done = doctor("--json")
    said = json.loads(done.stdout)
    assert said["ok"] is (done.returncode == 0)
    assert len(said["findings"]) > 8
    for finding in said["findings"]:
        assert set(finding) == {"name", "state", "what", "mend"}
        assert finding["state"] in ("ok", "note", "bad")
        assert bool(finding["mend"]) is (finding["state"] != "ok")


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
        "import sys, nanoactor.cli.main, nanoactor.doctor as doctor\n"
        "doctor.examine(doctor.look())\n"
        "assert not {'torch', 'torch_npu', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=90, check=False)
    assert done.returncode == 0


def test_main_ends_with_the_status(monkeypatch, capsys):
    monkeypatch.setattr("nanoactor.cli.doctor.look", lambda: changed(CPU_BOX, python=(3, 10, 0)))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "1 bad, 0 notes" in capsys.readouterr().out


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
        "nothing bad, 1 note",
    ]
    assert is_well(findings)
    assert json.loads(as_json(findings))["ok"] is True
