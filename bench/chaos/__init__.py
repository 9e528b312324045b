"""Chaos on real engines: breaks whatever a run is made of, and proves that no score is wrong.

    auditor (``python -m bench.chaos``)          driver (``bench.chaos.driver``, a process)
    ───────────────────────────────────          ──────────────────────────────────────────
    draws the schedule from the seed ──────────▶ a training loop with new weights at each point,
    tells what is left when it has ended         a real EvalDispatcher, store, fleet and runner,
    recomputes every reported score   ◀───────── and an injector that listens to the trace
    prints the table                   evidence

Nothing is simulated: real vLLM engines behind a real vllm-router, signals that the kernel sends, a
file system that is really full. When a fault strikes is drawn from the seed, relative to events
of the run ("when point 7 enters running", "at its 9th answer"), never by the clock.
"""
