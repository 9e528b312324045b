"""Nodes with a link each, instead of the cores and the memory of one machine between them.

Each node of this Ray cluster is at the end of a link of a stated rate (:mod:`bench.links`), low
enough that the links are what everybody waits for, as on a network of machines. The cluster, its
driver and the links are in a process with namespaces of its own (``python -m bench.linked``):
whatever ends that process ends all of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.links import PRIVATE, Links, in_namespaces

NUM_NODES = 4
STORE_BYTES = 300 << 20
_START_S = 90.0
_END_S = 20.0
_TAIL = 2000


@dataclass(frozen=True)
class Order:
    """What the process in there is to measure.

    Attributes:
        mbit: rate of each link, in 10^6 bits a second.
        path: the snapshot.
        warm_path: a smaller one, to begin with.
        run_dir: for traces.
        result: the file for what it came to.
        repeat: so many transfers to one node, and to all.
    """

    mbit: float
    path: str
    warm_path: str
    run_dir: str
    result: str
    repeat: int


@dataclass(frozen=True)
class Passage:
    """One transfer.

    Attributes:
        num_nodes: to so many.
        seconds: until all had it.
        cores: so many of this machine's were busy on average.
        home_sent: bytes that the driver's node sent, headers included.
        busiest: the most bytes that any link carried in one direction.
    """

    num_nodes: int
    seconds: float
    cores: float
    home_sent: int
    busiest: int


def measure(order: Order, limit_s: float) -> list[Passage]:
    """Have it measured.

    Raises:
        RuntimeError: it failed, or took longer than ``limit_s``.
    """
    command = in_namespaces([sys.executable, "-m", "bench.linked", json.dumps(asdict(order))])
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is for this process, which ends that one
    ) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"transfers over links took more than {limit_s:g} s") from None
        finally:
            _end(process)
    if status:
        raise RuntimeError(f"the transfers over links ended with status {status}")
    return [Passage(**fields) for fields in json.loads(Path(order.result).read_bytes())]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have everything in there ended: it lives as long as its input is open."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()


# -- in there --------------------------------------------------------------------------------------


def _main(argv: Sequence[str]) -> None:
    import anyio

    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    order = Order(**json.loads(argv[0]))
    links = Links(NUM_NODES + 1, order.mbit)
    links.enter(0)  # the driver is on the first node
    with _cluster(links) as nodes:
        passages = anyio.run(_passages, links, order, nodes, backend="asyncio")
    Path(order.result).write_text(json.dumps([asdict(passage) for passage in passages]))


def _end_with(descriptor: int) -> None:
    """End this process, and with it all in these namespaces, when nobody wants it any more."""
    os.read(descriptor, 1)
    os._exit(1)


async def _passages(links: Links, order: Order, nodes: list[str]) -> list[Passage]:
    found = [await _passage(links, Path(order.warm_path), Path(order.run_dir), nodes)]
    for _ in range(order.repeat):
        for chosen in (nodes[:1], nodes):
            found.append(await _passage(links, Path(order.path), Path(order.run_dir), chosen))
    return found[1:]


async def _passage(links: Links, path: Path, run_dir: Path, chosen: list[str]) -> Passage:
    from bench.transfers import transfer

    before, busy_s, began = links.traffic(), _busy_s(), time.perf_counter()
    seconds = await transfer(path, run_dir, chosen)
    cores = (_busy_s() - busy_s) / (time.perf_counter() - began)
    passed = [now - earlier for now, earlier in zip(links.traffic(), before, strict=True)]
    busiest = max(max(link.sent, link.received) for link in passed)
    return Passage(len(chosen), seconds, cores, passed[0].sent, busiest)


def _busy_s() -> float:
    """Seconds that this machine's cores have worked, all together."""
    import psutil

    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


@contextmanager
def _cluster(links: Links) -> Iterator[list[str]]:
    """A Ray node at the end of each link; yields the ids of all but the driver's."""
    os.environ |= {
        "RAY_TMPDIR": PRIVATE,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "of-this-benchmark",
    }
    import ray  # it reads them

    address = f"{links.address(0)}:6379"
    head = _start_node(links, 0, "--head", "--port=6379", "--include-dashboard=false")
    _wait_until(lambda: _accepts(links.address(0), 6379), [head])
    started = [head]
    for node in range(1, links.num_nodes):
        started.append(_start_node(links, node, f"--address={address}"))
    ray.init(
        address=address,
        _node_ip_address=links.address(0),
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        _wait_until(lambda: len(ray.nodes()) == links.num_nodes, started)
        home = ray.get_runtime_context().get_node_id()
        yield [node["NodeID"] for node in ray.nodes() if node["NodeID"] != home]
    finally:
        ray.shutdown()


def _start_node(links: Links, node: int, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a Ray node; it ends with these namespaces."""
    from vime.ray.depot import STAGING_VARIABLE

    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block"]
    command += [f"--node-ip-address={links.address(node)}", "--num-cpus=1", "--num-gpus=0"]
    command += [f"--object-store-memory={STORE_BYTES}"]
    with _log(node).open("wb") as log:
        return subprocess.Popen(
            command if node == 0 else links.within(node, command),
            env=os.environ | {STAGING_VARIABLE: f"{PRIVATE}/staging_{node}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _log(node: int) -> Path:
    return Path(PRIVATE, f"node_{node}.log")


def _wait_until(done: Callable[[], bool], nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    give_up = time.monotonic() + _START_S
    while not done():
        for number, node in enumerate(nodes):
            if node.poll() is not None:
                said = _log(number).read_text(errors="replace")[-_TAIL:]
                raise RuntimeError(f"node {number} ended at its start\n{said}")
        if time.monotonic() > give_up:
            raise RuntimeError(f"the nodes' start took more than {_START_S:g} s")
        time.sleep(0.1)


def _accepts(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


if __name__ == "__main__":
    _main(sys.argv[1:])
