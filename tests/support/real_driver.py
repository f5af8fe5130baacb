"""Whether tests run on the machine's own NVIDIA driver instead of the double: `SEGUE_TEST_DRIVER=real`.

Then there is nothing to skip: without a GPU the tests fail, so that nobody takes silence for success.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from segue_core.messages.probe import GpusFound, Line

VARIABLE, REAL = "SEGUE_TEST_DRIVER", "real"
LOOK_S = 60


def wanted() -> bool:
    """Whether the real driver was asked for."""
    return os.environ.get(VARIABLE) == REAL


def look() -> Line:
    """What a process sees of the driver."""
    command = [sys.executable, "-m", "segue_shim.cuda_probe", "list"]
    done = subprocess.run(command, capture_output=True, timeout=LOOK_S, check=True)
    found: Line = msgspec.json.decode(done.stdout.splitlines()[-1], type=Line)
    return found


def require() -> None:
    """Fail unless there is a GPU."""
    found = look()
    assert isinstance(found, GpusFound), found
    assert found.gpus, f"{VARIABLE}={REAL}, but there is no NVIDIA GPU here: {found.error or 'no driver'}"
