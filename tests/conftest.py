"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("vime", deadline=None)  # a busy machine is no failure
settings.load_profile("vime")
