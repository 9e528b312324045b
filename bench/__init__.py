"""The latency harness: what evaluating often costs a training run, measured on your machine.

``python -m bench NAME`` from the root of the repository; ``docs/bench.md`` says what each
benchmark measures and how to read its figures.
"""
