"""What is known of a machine: plain facts, no judgement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MANAGERS = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
"""The device nodes that every Ascend program opens besides those of the NPUs."""
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so")
SERVER_PORT = 8000


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as torch sees it."""

    name: str
    free: int | None = None
    """Bytes."""
    total: int | None = None
    trouble: str = ""
    """Why its memory could not be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class TorchFacts:
    """What a child process found that has imported torch, and torch_npu where there is one."""

    version: str | None = None
    trouble: str = ""
    """Why torch cannot be imported."""
    cut_short: str = ""
    """Why the child ended early: what it had not said yet is unknown."""
    cuda_build: str | None = None
    """The CUDA version that torch was built for."""
    cuda_devices: tuple[Device, ...] = ()
    cuda_trouble: str = ""
    triton: str | None = None
    npu_version: str | None = None
    """Of torch_npu, by its metadata: known where the import fails, too."""
    npu_trouble: str = ""
    """Why torch_npu cannot be imported or used."""
    npu_devices: tuple[Device, ...] = ()
    cann: str | None = None
    """The version of CANN that torch_npu sees."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A file in /dev."""

    path: str
    present: bool
    usable: bool
    """This process may read and write it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Smi:
    """What a run of `npu-smi info` gave."""

    healthy: int
    """Lines that say OK."""
    unhealthy: tuple[str, ...] = ()
    """Lines that say anything else of a device's health."""
    trouble: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ascend:
    """Driver and CANN, as files and environment variables show them."""

    driver: str | None = None
    firmware: str | None = None
    npus: tuple[Node, ...] = ()
    """/dev/davinci0 and so on."""
    managers: tuple[Node, ...] = tuple(Node(path, False, False) for path in MANAGERS)
    smi: Smi | None = None
    """None where there is no npu-smi."""
    home: str | None = None
    """ASCEND_HOME_PATH, or else ASCEND_TOOLKIT_HOME."""
    opp: str | None = None
    """ASCEND_OPP_PATH."""
    missing_directories: tuple[str, ...] = ()
    """Of the two above, what does not exist."""
    missing_libraries: tuple[str, ...] = CANN_LIBRARIES
    """In no directory of LD_LIBRARY_PATH."""
    cann: str | None = None
    """The version that its files name."""
    scripts: tuple[str, ...] = ()
    """Every set_env.sh that was found, the usual place first."""


@dataclasses.dataclass(frozen=True, slots=True)
class PciDevice:
    """An accelerator on the PCI bus."""

    address: str
    kind: str
    """NPU or GPU."""
    numa: int | None
    """The NUMA node it is attached to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ports:
    """Which ports could be bound."""

    loopback_trouble: str = ""
    server_taken: bool = False
    hccl_base: str = "60000"
    """HCCL_IF_BASE_PORT, or its default."""
    hccl_taken: tuple[int, ...] = ()
    hccl_range: str | None = None
    """HCCL_HOST_SOCKET_PORT_RANGE."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Shared memory and what the process may have. None: no limit, or unknown."""

    rings_trouble: str = ""
    """Why anonymous memory or an eventfd cannot be had."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    open_files: int | None = None
    most_open_files: int | None = None
    """What the soft limit can be raised to."""
    locked: int | None = None
    """Bytes of memory that may be locked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cpu:
    """Processors and memory of the host, or of the container where it has less."""

    cores: int = 1
    quota: float | None = None
    """Processors' worth of time that the container is given."""
    memory: int | None = None
    available: int | None = None
    bfloat16: bool = False
    """The processor multiplies in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """Everything that `examine` goes by."""

    python: tuple[int, int, int]
    torch: TorchFacts = TorchFacts()
    ascend: Ascend = Ascend()
    nvidia_driver: str | None = None
    nvidia_nodes: tuple[str, ...] = ()
    visible: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """ASCEND_RT_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES, where they are set."""
    in_container: bool = False
    ports: Ports = Ports()
    limits: Limits = Limits()
    numa_nodes: int = 1
    pci: tuple[PciDevice, ...] = ()
    cpu: Cpu = Cpu()

    @property
    def wants_npu(self) -> bool:
        """Whether an NPU is meant to be used here. Software alone counts, as a container that was
        not given its devices has nothing else; the PCI bus does not, as it shows the host's."""
        ascend = self.ascend
        signs = (ascend.npus, ascend.driver, ascend.home, ascend.scripts, self.torch.npu_version)
        return any(signs)

    @property
    def wants_gpu(self) -> bool:
        """Whether there is an NVIDIA GPU, or torch sees one."""
        return bool(self.torch.cuda_devices or self.nvidia_nodes or self.nvidia_driver) or any(
            device.kind == "GPU" for device in self.pci
        )
