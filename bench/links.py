"""A small network on this machine: one link of a stated rate to each node, and a switch between.

Each node is a network namespace with a pair of virtual cables to a bridge; a token bucket at either
end limits what the node sends and what it receives. All of it lives in namespaces of one process's
own (:func:`in_namespaces`), and ends with that process, by whatever: nothing else on the machine
sees it, and nothing of it is left. See tc-tbf(8), veth(4), unshare(1).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")
_CLONE_NEWNET = 0x40000000
_LIMIT_S = 20.0

#: A file system in memory of the process's own, over the one where ip(8) names namespaces.
PRIVATE = "/run"

#: What a bucket may let through at once, and what may wait before it, in bytes: a virtual cable
#: carries up to 64 KiB as one packet, and a switch drops what it has no room for.
_BURST_BYTES = 256 << 10
_QUEUE_BYTES = 4 << 20


@dataclass(frozen=True)
class Traffic:
    """What has gone over one node's link, headers included, in bytes."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def in_namespaces(command: Sequence[str]) -> list[str]:
    """The command that runs another one in network, mount and process namespaces of its own.

    That one is the first process in there: when it ends, the kernel ends all others. Who is not
    root becomes it in there, where the system lets him.
    """
    own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*own, *([] if os.geteuid() == 0 else ["--map-root-user"]), "--", *command]


def problem() -> str | None:
    """Why there can be no links here, or ``None``."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here (packages iproute2, util-linux)"
    steps = " && ".join(" ".join(step) for step in _steps(1, 1.0))
    try:
        tried = subprocess.run(
            in_namespaces(["sh", "-c", steps]), capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"namespaces took more than {_LIMIT_S:g} s to make"
    if tried.returncode == 0:
        return None
    said = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
    return f"this system allows no network namespaces with shaped links ({said[-1]}); try as root"


class Links:
    """The network of some nodes; to be made once, in a process of :func:`in_namespaces`.

    Args:
        num_nodes: from 1 to 200.
        mbit: the rate of each link in either direction, in 10^6 bits a second.

    Raises:
        RuntimeError: the system refused; with what it said.
    """

    def __init__(self, num_nodes: int, mbit: float) -> None:
        assert 1 <= num_nodes <= 200, num_nodes
        self.num_nodes = num_nodes
        self.mbit = mbit
        for step in _steps(num_nodes, mbit):
            _run(step)

    def address(self, node: int) -> str:
        """Of a node, counted from 0."""
        return _address(node)

    def within(self, node: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a node, with a :data:`PRIVATE` of its own."""
        own = f'mount -t tmpfs -o size=100% tmpfs {PRIVATE} && exec "$@"'
        inside = ["nsenter", f"--net={_path(node)}", "--", "unshare", "--mount", "--"]
        return [*inside, "sh", "-c", own, "sh", *command]

    def enter(self, node: int) -> None:
        """Move this thread, and all that it starts from now on, to a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(_path(node), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"node {node} cannot be entered")
        finally:
            os.close(namespace)

    def traffic(self) -> list[Traffic]:
        """What has gone over each node's link so far."""
        return [
            _parse_traffic(_run(["ip", "-n", f"node{node}", "-j", "-s", "link", "show", "wire"]))
            for node in range(self.num_nodes)
        ]


def _parse_traffic(text: str) -> Traffic:
    (link,) = json.loads(text)
    counted = link["stats64"]
    return Traffic(counted["tx"]["bytes"], counted["rx"]["bytes"])


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _path(node: int) -> str:
    return f"{PRIVATE}/netns/node{node}"


def _steps(num_nodes: int, mbit: float) -> list[list[str]]:
    """The commands that make the network, in order."""
    bucket = f"root tbf rate {mbit * 1e6:.0f}bit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
    lines = [f"mount -t tmpfs -o size=100% tmpfs {PRIVATE}", "ip link add switch type bridge"]
    lines.append("ip link set switch up")
    for node in range(num_nodes):
        name, port = f"node{node}", f"port{node}"
        lines += [
            f"ip netns add {name}",
            f"ip link add {port} type veth peer name wire netns {name}",
            f"ip link set {port} master switch up",
            f"ip -n {name} address add {_address(node)}/24 dev wire",
            f"ip -n {name} link set lo up",
            f"ip -n {name} link set wire up",
            f"tc -n {name} qdisc add dev wire {bucket}",  # what the node sends
            f"tc qdisc add dev {port} {bucket}",  # what it receives
        ]
    return [line.split() for line in lines]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
