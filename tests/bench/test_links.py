"""Links of a stated rate: what makes them, what says why there are none, and that they limit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import cli, linked, links, ray
from bench.links import Traffic
from bench.transfers import make_snapshot

_PASSAGE = """
import json, socket, sys, threading, time
from bench.links import Links

network = Links(2, 80)
there, count = network.address(1), 4_000_000


def listener():
    network.enter(1)
    return socket.create_server((there, 5000))


def receive(server):
    with server, server.accept()[0] as stream:
        while stream.recv(1 << 20):
            pass


def in_a_thread(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


thread, results = in_a_thread(listener)
thread.join()
thread, _ = in_a_thread(receive, results[0])
network.enter(0)
before, began = network.traffic(), time.monotonic()
with socket.create_connection((there, 5000)) as stream:
    stream.sendall(bytes(count))
thread.join()
took_s = time.monotonic() - began
first, second = (now - then for now, then in zip(network.traffic(), before))
print(json.dumps({"sent": first.sent, "received": second.received, "took_s": took_s}))
"""

needs_namespaces = pytest.mark.skipif("links.problem() is not None")


def test_each_node_is_limited_in_what_it_sends_and_in_what_it_receives() -> None:
    steps = [" ".join(step) for step in links._steps(3, 12.5)]
    limits = [step for step in steps if "tbf rate 12500000bit" in step]
    assert [step.partition(" root")[0] for step in limits] == [
        f"tc {end}"
        for node in range(3)
        for end in (f"-n node{node} qdisc add dev wire", f"qdisc add dev port{node}")
    ]


def test_what_went_over_a_link_is_read_from_its_counters() -> None:
    text = json.dumps([{"stats64": {"tx": {"bytes": 7}, "rx": {"bytes": 5}}}])
    assert links._parse_traffic(text) - Traffic(4, 3) == Traffic(3, 2)


def test_who_is_not_root_becomes_it_in_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for uid, wanted in ((0, False), (1000, True)):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        assert ("--map-root-user" in links.in_namespaces(["true"])) is wanted


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = links.problem()
    assert problem is not None
    assert problem.startswith("there is no unshare and no nsenter and no mount and no ip and no tc")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A system that allows no namespaces, and says so in two lines."""
    for tool in links._TOOLS:
        (tmp_path / tool).write_text(
            "#!/bin/sh\necho noise >&2\necho 'not permitted' >&2\nexit 1\n"
        )
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("refused")
def test_a_system_that_allows_none_is_quoted_where_links_were_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["ray", "--links", "100"]) == cli.USAGE_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert "--links 100: this system allows no network namespaces" in line
    assert "(not permitted); try as root, or leave this flag out" in line


@pytest.mark.usefixtures("refused")
def test_where_nobody_asked_for_links_the_rest_is_measured_and_the_reason_given() -> None:
    mbit, reason = ray._rate(argparse.Namespace(links=None, no_links=False))
    assert mbit is None
    assert "(not permitted)" in reason


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "nan"])
def test_a_rate_that_is_none_is_refused(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ray", f"--links={rate}"]) == cli.USAGE_ERROR
    assert f"{rate!r}: expected a number above 0" in capsys.readouterr().err


@pytest.mark.slow
@needs_namespaces
def test_what_goes_from_node_to_node_goes_over_both_links_and_no_faster_than_they_are() -> None:
    done = subprocess.run(
        links.in_namespaces([sys.executable, "-c", _PASSAGE]),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["sent"] > 4_000_000
    assert found["received"] > 4_000_000
    assert found["took_s"] > 8 * (4_000_000 - 2 * links._BURST_BYTES) / 80e6


@pytest.mark.slow
@needs_namespaces
def test_nothing_is_left_of_them_when_what_made_them_is_killed() -> None:
    script = "import time; from bench.links import Links; Links(2, 80); print(1); time.sleep(600)"
    command = links.in_namespaces([sys.executable, "-uc", script])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"1\n"
        below = psutil.Process(maker.pid).children(recursive=True)
        maker.kill()
    assert below
    assert psutil.wait_procs(below, timeout=30)[1] == []
    assert not Path("/sys/class/net/port0").exists()


@pytest.mark.real
@pytest.mark.timeout(180)
@needs_namespaces
def test_the_drivers_node_sends_a_snapshot_to_four_nodes_once_over_its_link(tmp_path: Path) -> None:
    path, size = make_snapshot(tmp_path / "home", 0, 0.03)
    warm_path, _ = make_snapshot(tmp_path / "home", 1, 0.001)
    order = linked.Order(
        mbit=400,
        path=str(path),
        warm_path=str(warm_path),
        run_dir=str(tmp_path),
        result=str(tmp_path / "result"),
        repeat=1,
    )
    one, four = linked.measure(order, 150)
    assert (one.num_nodes, four.num_nodes) == (1, 4)
    for passage in (one, four):
        assert size < passage.home_sent < 2 * size
        assert passage.seconds > 8 * (size - 2 * links._BURST_BYTES) / 400e6
