"""The dedicated engines: vLLM servers behind a router, pinned to one snapshot at a time."""
