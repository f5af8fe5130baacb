"""`python -m segue_daemon`: the same as the `segue-daemon` command."""

from __future__ import annotations

import sys

from segue_daemon.cli import main

sys.exit(main())
