"""Processes of ours beside the edge, each started with one end of a socket, out of the terminal's reach."""

import subprocess
from collections.abc import Sequence


def spawn(command: Sequence[str], link_fd: int) -> subprocess.Popen[bytes]:
    """Spawn (never fork: the edge has threads) in a session of its own, where Ctrl-C does not reach it.

    command: gets ``--fd N`` appended. link_fd: its end of the link, which the caller closes.
    Raises: OSError when the process cannot be started.
    """
    return subprocess.Popen(
        [*command, "--fd", str(link_fd)],
        pass_fds=(link_fd,),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=2,  # The server's own output stays clean for whoever reads its URL.
    )
