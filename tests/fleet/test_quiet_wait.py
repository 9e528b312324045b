"""vLLM's processes, which wait for each other, leave the processor to those that compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: A process waits for messages, as a core waits for its worker, while another one computes; then
#: messages come one right after the other. It prints the share of the processor time of the one
#: that waits, whether it waits in another way than vLLM's, and what has arrived.
PROGRAM = """
import json, multiprocessing, time
import psutil
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition
from vime.eval.fleet.vllm_plugin import join_fleet

def wait(pipe):
    as_it_was = SpinCondition.wait
    join_fleet()
    pipe.send(SpinCondition.wait is not as_it_was)
    reader = MessageQueue.create_from_handle(pipe.recv(), 0)
    reader.wait_until_ready()
    got = []
    while (message := reader.dequeue(timeout=60)) != "end":
        got.append(message)
        if message == "begin":
            pipe.send("begun")
    pipe.send(got)

context = multiprocessing.get_context("fork")
mine, its = context.Pipe()
waiter = context.Process(target=wait, args=(its,))
waiter.start()
changed = mine.recv()
writer = MessageQueue(1, 1)
mine.send(writer.export_handle())
writer.wait_until_ready()
writer.enqueue("begin")
mine.recv()
used = psutil.Process(waiter.pid).cpu_times
before, computed = used().user + used().system, time.process_time()
while time.process_time() < computed + 0.3:
    pass
share = (used().user + used().system - before) / 0.3
for number in range(200):
    writer.enqueue(number)
writer.enqueue("end")
print(json.dumps([changed, share, mine.recv()]))
waiter.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scarce", [True, False])
def test_a_process_that_waits_for_another_sleeps_where_cores_are_scarce_and_misses_nothing(
    scarce: bool,
) -> None:
    env = os.environ | {"VIME_CONTROL_TOKEN": "t" * 8, "VLLM_LOGGING_LEVEL": "ERROR"}
    env |= {"VIME_SCARCE_CORES": "1" if scarce else ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=env, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    changed, share, got = json.loads(done.stdout.splitlines()[-1])
    assert got == ["begin", *range(200)]
    assert changed is scarce
    assert share < 0.15 or not scarce, f"it took {share:.0%} of what the other one computed"
