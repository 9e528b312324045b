"""The words of the dispatcher when it ends a point by itself.

They stand in the trace as the ``message`` of a skip, and tell its own decisions from what its
collaborators raised, for people and for :mod:`vime.eval.rerun`.
"""

from __future__ import annotations

#: Reason ``cancelled``: in the admission window, between admission and launch, and later.
NO_SLOT = "the run ended while it waited for a slot"
NOT_HANDED_OVER = "its caller was interrupted before the hand-over"
STILL_PENDING = "it was still pending when the run ended"

#: Reason ``export_failed``: what the store's refusal of a directory begins with.
NO_DIRECTORY = "no directory for the snapshot: "

#: Reasons ``timeout_…``: what took too long by the dispatcher's own clock.
EXPORT = "writing and verifying the snapshot"
TURN = "waiting for its turn"
PIN = "its turn at the fleet and its pin"
EVALUATION = "the evaluation's last word"
WAITS = (EXPORT, TURN, PIN, EVALUATION)
