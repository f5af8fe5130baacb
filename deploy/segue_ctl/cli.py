"""`seguectl`: the command line. One module a verb; each adds its parser and runs, this one only chooses.

Exit status: 0 ok, 1 failed, 2 usage or configuration, 3 unhealthy or unreachable.
"""

from __future__ import annotations

import argparse
import sys

from segue_core import __version__
from segue_core.errors import ConfigError, SegueError
from segue_ctl import bench, check_config, demo, doctor, drain, keygen, status
from segue_ctl.output import FAILED, USAGE, complain

_VERBS = (status, doctor, drain, check_config, keygen, demo, bench)
_INTERRUPTED = 130

_EPILOG = """\
examples:
  seguectl status                          the router on this host, its engines and daemons
  seguectl status http://host:7101 --json  one daemon, for a program
  seguectl doctor --config daemon.yaml     this machine, its GPUs, and what that daemon needs
  seguectl drain a                         empty engine a before it is stopped
  seguectl check-config /etc/segue/*.yaml  before a restart
  seguectl keygen --out keys gpu0 gpu1     keys for daemons on several hosts
  seguectl demo                            kill an engine in the middle of an answer

exit status: 0 ok, 1 failed, 2 usage or configuration, 3 unhealthy or unreachable
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(
        prog="seguectl",
        description="Look after Segue: when an engine dies, the answer goes on.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"seguectl {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in _VERBS:
        verb.add_parser(verbs)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
    except ConfigError as error:
        complain(str(error))
        return USAGE
    except SegueError as error:
        complain(str(error))
        return FAILED
    except KeyboardInterrupt:
        complain("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader left, such as `| head`; nothing more can be said
        return FAILED
    return code
