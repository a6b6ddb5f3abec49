"""The process that checks run in: started, watched and replaced by `tests.npu.smoke`.

Its only argument is JSON; the names of checks come on standard input, a line each; answers, JSON
as well, go to the file descriptor that the argument names.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import nanoactor
from nanoactor.doctor import Machine
from nanoactor.doctor.ascend import driver_version
from nanoactor.models.devices import open_device
from nanoactor.models.devices.npu.device import NPUDevice
from nanoactor.models.errors import UnsupportedModel
from nanoactor.models.options import DeviceOptions
from tests.npu.smoke_checks import (
    attention,
    collectives,
    engines,
    environment,
    figures,
    images,
    numbers,
    operators,
)
from tests.npu.smoke_checks.frame import Check, Failed, Rig, Skipped, told_of


def open_rig(given: dict[str, Any]) -> Rig:
    """Raises `UnsupportedModel` where there is no NPU."""
    kind, _, index = given["device"].partition(":")
    device = open_device(given["device"], int(index or 0), DeviceOptions(graph_mode="eager"))
    assert isinstance(device, NPUDevice), kind
    device.prepare_thread(torch.get_num_threads())
    return Rig(
        device,
        given["device"],
        given["devices"],
        given["quick"],
        given["emulated"],
        Path(given["scratch"]),
        given["graph_mode"],
    )


def all_checks(rig: Rig) -> list[Check]:
    """In the order of the table."""
    return [
        *environment.checks(),
        *operators.checks(rig),
        *attention.checks(rig),
        *numbers.checks(),
        *engines.checks(rig),
        *images.checks(rig),
        *collectives.checks(rig),
        *engines.fractal_checks(),
        *figures.checks(rig),
    ]


def versions(rig: Rig) -> dict[str, str]:
    """Of everything that a result may depend on."""
    runtime = rig.device.runtime
    torch_npu = getattr(runtime, "torch_npu", None)
    found = {
        "nanoactor": nanoactor.__version__,
        "python": f"{platform.python_version()} on {platform.machine()}",
        "torch": torch.__version__,
        "torch_npu": "none" if torch_npu is None else str(torch_npu.__version__),
        "chip": runtime.chip,
    }
    if torch_npu is not None:
        driver = driver_version(Machine()) or "unknown"
        found |= {"CANN": runtime.versions()[2] or "unknown", "driver": driver}
    return found


def carry_out(check: Check, rig: Rig) -> dict[str, Any]:
    """A line of the table. `spoiled`: whether the process should not be used again."""
    begin, spoiled = time.perf_counter(), False
    try:
        said, result = check.function(rig), "FIGURE" if check.figure else "PASS"
        rig.device.synchronize()  # what fails late belongs to this check
    except Skipped as skipped:
        said, result = str(skipped), "SKIP"
        spoiled = skipped.__cause__ is not None
    except Failed as failed:
        said, result = str(failed), "FAIL"
        spoiled = failed.__cause__ is not None
    except Exception as error:
        traceback.print_exc()
        said, result, spoiled = told_of(error), "FAIL", True
    seconds = time.perf_counter() - begin
    return {"result": result, "seconds": seconds, "said": said, "spoiled": spoiled}


def main() -> None:
    """Answer until there is nothing more to do."""
    given = json.loads(sys.argv[1])
    # What checks print, and what drivers do, is for the log.
    with os.fdopen(given["answers"], "w") as answers:

        def answer(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=answers, flush=True)

        try:
            rig = open_rig(given)
        except UnsupportedModel as error:
            answer({"impossible": str(error)})
            return
        except Exception as error:
            traceback.print_exc()
            answer({"impossible": f"{given['device']} cannot be opened: {told_of(error)}"})
            return
        checks = {check.name: check for check in all_checks(rig)}
        fields = ("name", "alone", "seconds", "skip")
        known = [{name: getattr(check, name) for name in fields} for check in checks.values()]
        answer({"versions": versions(rig), "checks": known})
        for line in sys.stdin:
            answer(carry_out(checks[json.loads(line)], rig))


if __name__ == "__main__":
    main()
