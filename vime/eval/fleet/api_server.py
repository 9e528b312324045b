"""The main program of an engine: vLLM's own API server, imported without what it does not need.

``python -m vime.eval.fleet.api_server`` takes the command line of vLLM's server and does the same.
An engine is a server, a core and its workers, and each of these processes imports vLLM afresh:
that is most of an engine's start on a CPU. Three things make it shorter.

- Of the millions of objects that these imports make hardly one is garbage, and Python's collector,
  as it is set at first, looks through all of them again and again. Here it looks less often.
- transformers imports scikit-learn, where it is installed, for a way of generating that vLLM does
  not use. Here it finds none, unless the model may bring code of its own, which might want it.
- With vLLM's server as the main module, its children would import the server's routes, too:
  processes that are spawned run the main module of their parent first. That is this one.

And it ends with its core: see :mod:`vime.eval.fleet.dead_core`.
"""

from __future__ import annotations

import gc
import runpy
import sys

#: Allocations between two looks at the youngest objects, and how many of these looks come before
#: one at the older ones. Python's own are 700, 10, 10.
THRESHOLDS = (100_000, 50, 50)

_VLLM = "vllm.entrypoints.openai.api_server"

if __name__ in ("__main__", "__mp_main__"):  # it is the program, or that of what it spawned
    gc.set_threshold(*THRESHOLDS)
    if "--trust-remote-code" not in sys.argv:  # children have the words of their parent
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # as if not installed

if __name__ == "__main__":
    from vime.eval.fleet.dead_core import end_with_children

    end_with_children()
    # In a namespace of its own: the main module, which children look for, stays this one.
    runpy.run_module(_VLLM, run_name="__main__")
