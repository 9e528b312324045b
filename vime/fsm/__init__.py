"""The state machines and their trace: pure, no I/O beyond the trace file."""
