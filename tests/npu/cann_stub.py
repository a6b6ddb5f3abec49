"""Stand-ins for the CANN libraries that torch_npu links: so that its own schemas, shape functions,
passes and converters can be run where there is no CANN. Nothing of a device is imitated.

    python -m tests.npu.cann_stub DIRECTORY

reads which symbols the wheel's libraries lack, and builds one library that has them, under every
name that is asked for; needs gcc and pyelftools. C functions return `ERROR`, which torch_npu turns
into a RuntimeError; C++ ones return 0. With CANN_STUB_SOFT_DEVICE=1 host memory poses as the
device's (`SOFT`): tensors can be made, copied and freed, streams and events are handles that do
nothing, graphs note that they were recorded. No operator exists, so nothing can be computed.
CANN_STUB_TRACE=FILE appends the name of each function called.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

ERROR = 999001

# Arguments are named a to f, each as wide as a pointer.
ALWAYS = {
    "aclInit": "return 0;",
    "aclFinalize": "return 0;",
    "aclrtGetDeviceCount": "if (a) *(unsigned *)a = count(); return 0;",
    "aclrtGetSocName": "return (long)chip();",
    "aclGetRecentErrMsg": 'return (long)"a stub of CANN: there is no device";',
}
_NOTHING = """
    aclrtSetDeviceSatMode aclSetCompileopt aclrtSetSysParamOpt aclGetCompileopt
    aclrtSetOpExecuteTimeOut aclrtResetDevice aclrtResetDeviceForce aclrtSetCurrentContext
    aclrtDestroyStream aclrtDestroyStreamForce aclrtSynchronizeStream
    aclrtSynchronizeStreamWithTimeout aclrtSynchronizeDevice aclrtSynchronizeDeviceWithTimeout
    aclrtDestroyEvent aclrtRecordEvent aclrtResetEvent aclrtStreamWaitEvent aclrtSynchronizeEvent
    aclmdlRICaptureThreadExchangeMode aclmdlRICaptureTaskUpdateBegin aclmdlRICaptureTaskUpdateEnd
    aclmdlRIExecuteAsync aclmdlRIDestroy
""".split()  # noqa: SIM905
_HANDLE = """
    aclrtCreateStream aclrtCreateStreamWithConfig aclrtCreateEventExWithFlag
    aclrtCreateEventWithFlag aclrtCreateEvent
""".split()  # noqa: SIM905
_ALLOCATE = ["aclrtMalloc", "aclrtMallocAlign32", "aclrtMallocWithCfg"]
_ALLOCATE_HOST = ["aclrtMallocHost", "aclrtMallocHostWithCfg"]
SOFT = {
    **dict.fromkeys(_NOTHING, "return 0;"),
    **dict.fromkeys(_HANDLE, "*(void **)a = malloc(64); return 0;"),
    **dict.fromkeys(_ALLOCATE, "return posix_memalign((void **)a, 512, (size_t)b) ? 207001 : 0;"),
    **dict.fromkeys(
        _ALLOCATE_HOST, "return posix_memalign((void **)a, 64, (size_t)b) ? 207001 : 0;"
    ),
    "aclrtSetDevice": "device = (int)(long)a; return 0;",
    "aclrtGetDevice": "*(int *)a = device; return 0;",
    "aclrtGetCurrentContext": "*(void **)a = (void *)&device; return 0;",
    "aclrtGetSysParamOpt": "*(long *)b = 0; return 0;",
    "aclGetCompileoptSize": "return 1;",
    "aclrtStreamQuery": "*(int *)b = 0; return 0;",
    "aclrtQueryEventStatus": "*(int *)b = 1; return 0;",
    "aclrtQueryEventWaitStatus": "*(int *)b = 1; return 0;",
    "aclrtEventElapsedTime": "*(float *)a = 0; return 0;",
    "aclrtFree": "free(a); return 0;",
    "aclrtFreeHost": "free(a); return 0;",
    "aclrtMemcpy": "memmove(a, c, (size_t)d); return 0;",
    "aclrtMemcpyAsync": "memmove(a, c, (size_t)d); return 0;",
    "aclrtMemset": "memset(a, (int)(long)c, (size_t)d); return 0;",
    "aclrtMemsetAsync": "memset(a, (int)(long)c, (size_t)d); return 0;",
    "aclrtGetMemInfo": "*(size_t *)b = 48UL << 30; *(size_t *)c = 64UL << 30; return 0;",
    "aclrtDeviceCanAccessPeer": "*(int *)a = 0; return 0;",
    "aclmdlRICaptureBegin": "recording = 1; graph = malloc(64); *graph = ++graphs; return 0;",
    "aclmdlRICaptureEnd": "recording = 0; *(void **)b = graph; return 0;",
    "aclmdlRICaptureGetInfo": "if (b) *(int *)b = recording; if (c) *(void **)c = graph; return 0;",
    "aclmdlRICaptureTaskGrpBegin": "return recording ? 0 : 107000;",
    "aclmdlRICaptureTaskGrpEnd": "*(void **)b = malloc(64); return recording ? 0 : 107000;",
    # torch_npu looks recordings up by their ids, and forgets that of a graph that goes.
    "aclmdlRIGetId": "*(unsigned *)b = *(unsigned *)a; return 0;",
}
# They return handles: failure is NULL.
_MAKERS = ("aclCreate", "aclopCreateAttr", "acltdtCreate", "acltdtGetDataItem", "acltdtGetDataAddr")
_DATA = ("_ZTV", "_ZTI", "_ZTS", "_ZTT")
_HEAD = """\
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int device, recording;
static unsigned *graph, graphs;
static unsigned count(void) { const char *n = getenv("FAKE_NPU_COUNT"); return n ? atoi(n) : 0; }
static const char *chip(void) {
    const char *n = getenv("FAKE_NPU_SOC");
    return n ? n : "Ascend910B2";
}
static int soft(void) { return getenv("CANN_STUB_SOFT_DEVICE") != 0; }
static void trace(const char *name) {
    const char *path = getenv("CANN_STUB_TRACE");
    FILE *file = path ? fopen(path, "a") : 0;
    if (file) { fprintf(file, "%s\\n", name); fclose(file); }
}
"""


@dataclasses.dataclass(frozen=True)
class Library:
    """What a shared library needs and has."""

    names: set[str]
    needed: list[str]
    undefined: set[str]
    defined: set[str]


def read(path: Path) -> Library:
    """The dynamic symbols of a file. A weak one that is undefined may stay so."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        tags = [
            tag
            for section in elf.iter_sections()
            if isinstance(section, DynamicSection)
            for tag in section.iter_tags()
        ]
        table = elf.get_section_by_name(".dynsym")
        symbols = [symbol for symbol in table.iter_symbols() if symbol.name] if table else []
        missing = [symbol for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"]
        return Library(
            {path.name} | {tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"},
            [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"],
            {s.name for s in missing if s["st_info"]["bind"] != "STB_WEAK"},
            {s.name for s in symbols} - {s.name for s in missing},
        )


def _of_the_system(name: str) -> Path | None:
    asked = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    path = Path(asked.stdout.strip())
    return path.resolve() if path.is_absolute() and path.exists() else None


def _libraries(package: str) -> Iterator[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed for {sys.executable}")
    yield from Path(spec.origin).parent.rglob("*.so*")


def missing() -> tuple[set[str], set[str]]:
    """(names of libraries, symbols) that torch_npu wants and nobody has."""
    wheel = [read(path) for path in _libraries("torch_npu")]
    others = [read(path) for path in _libraries("torch") if path.parent.name == "lib"]
    others.append(read(Path(sys.executable).resolve()))
    python = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(
        sysconfig.get_config_var("LDLIBRARY")
    )
    if python.suffix != ".a" and python.exists():
        others.append(read(python))
    have = {name for library in (*wheel, *others) for name in library.names}
    wanted = {name for library in wheel for name in library.needed} - have
    found = {name: path for name in wanted if (path := _of_the_system(name))}
    others += [read(path) for path in found.values()]
    defined = {symbol for library in (*wheel, *others) for symbol in library.defined}
    undefined = {symbol for library in wheel for symbol in library.undefined} - defined
    return wanted - found.keys(), {s for s in undefined if not re.match(r"_?Py[A-Z_]", s)}


def source(symbols: set[str]) -> str:
    """In C."""
    lines = [_HEAD]
    arguments = "(void *a, void *b, void *c, void *d, void *e, void *f)"
    for number, symbol in enumerate(sorted(symbols)):
        if symbol.startswith(_DATA):
            lines.append(f'void *data{number}[64] __asm__("{symbol}") = {{0}};')
            continue
        lines.append(f'long function{number}{arguments} __asm__("{symbol}");')
        lines.append(f'long function{number}{arguments} {{ trace("{symbol}"); {_body(symbol)} }}')
    # What torch_npu looks up by name when it is needed.
    for symbol in sorted((ALWAYS.keys() | SOFT.keys()) - symbols):
        lines.append(f'long {symbol}{arguments} {{ trace("{symbol}"); {_body(symbol)} }}')
    return "\n".join(lines) + "\n"


def _body(symbol: str) -> str:
    if symbol in ALWAYS:
        return ALWAYS[symbol]
    nothing = symbol.startswith(("_Z", *_MAKERS))
    failure = "return 0;" if nothing else f"return {ERROR};"
    return f"if (soft()) {{ {SOFT[symbol]} }} {failure}" if symbol in SOFT else failure


def build(directory: Path) -> None:
    """Write the libraries."""
    names, symbols = missing()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "stub.c").write_text(source(symbols))
    (directory / "empty.c").write_text("static int unused;\n")
    gcc = ["gcc", "-shared", "-fPIC", "-O1", "-w"]
    whole = ["-o", "libcann_stub.so", "stub.c", "-Wl,-soname,libcann_stub.so"]
    subprocess.run([*gcc, *whole], cwd=directory, check=True)
    for name in sorted(names):
        link = ["-Wl,--no-as-needed", "-L.", "-lcann_stub", "-Wl,-rpath,$ORIGIN"]
        one = ["-o", name, "empty.c", f"-Wl,-soname,{name}", *link]
        subprocess.run([*gcc, *one], cwd=directory, check=True)
    print(f"{len(symbols)} functions under {len(names)} names in {directory}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    build(parser.parse_args().directory)
