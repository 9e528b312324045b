"""The main program of an engine: vLLM's own API server, imported without needless sweeps.

``python -m vime.eval.fleet.api_server`` takes the command line of vLLM's server and does the same.
An engine is a server, a core and its workers, and each of these processes imports vLLM afresh:
that is most of an engine's start on a CPU. Of the millions of objects that these imports make
hardly one is garbage, and Python's collector, as it is set at first, looks through all of them
again and again. Here it looks less often. Processes that vLLM spawns run the main module of
their parent first, so that this holds for all of them; with vLLM's own as the main module they
would import the server's routes, too, which they have no use for.
"""

from __future__ import annotations

import gc
import runpy

#: Allocations between two looks at the youngest objects, and how many of these looks come before
#: one at the older ones. Python's own are 700, 10, 10.
THRESHOLDS = (100_000, 50, 50)

_VLLM = "vllm.entrypoints.openai.api_server"

if __name__ in ("__main__", "__mp_main__"):  # it is the program, or that of what it spawned
    gc.set_threshold(*THRESHOLDS)

if __name__ == "__main__":
    # In a namespace of its own: the main module, which children look for, stays this one.
    runpy.run_module(_VLLM, run_name="__main__")
