"""What every number and every path that a person names must keep to, wherever it is said."""

from __future__ import annotations

#: Longest deadline, in seconds. What waits takes it: threads, event loops and stores.
LONGEST_S = 30 * 24 * 3600
LONGEST = f"{LONGEST_S} seconds (30 days)"

#: Largest whole number where nothing else is said; JSON and digests take no more than 64 bits.
LARGEST = 2**31 - 1
LARGEST_64_BIT = 2**63 - 1

EMPTY = "got an empty string; is a shell variable unset?"
EMPTY_PATH = f"expected a path, {EMPTY}"
