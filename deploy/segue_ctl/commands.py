"""Where the other commands of this installation are. The tool runs them; it never imports them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from segue_core.errors import StartupError


def console_script(command: str) -> str:
    """The command as installed beside this Python. Raises StartupError if it is not."""
    script = Path(sys.executable).parent / command
    if script.is_file():
        return str(script)
    found = shutil.which(command)
    if found is None:
        raise StartupError(f"{command} is not installed beside {sys.executable}", hint="make setup")
    return found
