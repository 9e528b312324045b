"""Runs the real dispatcher again, its collaborators answering from a trace."""

from vime.eval.rerun.stage import Rerun, rerun

__all__ = ["Rerun", "rerun"]
