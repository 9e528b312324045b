"""A run's directory: taken by one live run at a time, begun anew or continued."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from vime.eval.config import ConfigError
from vime.eval.journal.past import Past, read_past
from vime.eval.journal.tail import mend_tail
from vime.eval.locks import FileLock, LockedError
from vime.fsm.read import MAX_LINE, TraceUnreadableError
from vime.fsm.trace import Trace

log = logging.getLogger("vime")

TRACE = "trace.jsonl"
METRICS = "metrics.jsonl"
LOCK = ".run.lock"

_NODE = "driver"

#: What file systems say that know no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class RunDirectory:
    """One run's hold on its directory.

    Args:
        path: made when it is missing.
        run_id: the run.
        resume: go on with the run whose trace is there; without one, begin.

    Attributes:
        path: the directory.
        past: what earlier runs left there; ``None`` in a directory that was new.
        trace: the journal, at its end.

    Raises:
        ConfigError: a live run has it, there is a run already and ``resume`` is false, or it
            cannot be used.
    """

    def __init__(self, path: Path, run_id: str, *, resume: bool = False) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise _problem(path, "expected a directory, and it is a file")
        self._lock: FileLock | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_another(resume)
            self._lock = self._take_lock(run_id)
            self._refuse_another(resume)  # which came in between
            self._refuse_irregular()
            self.past = self._read_past()
            self.trace = self._open_trace(run_id)
        except OSError as error:
            self.release()
            raise _problem(path, error.strerror or str(error)) from None
        except BaseException:
            self.release()
            raise

    @property
    def metrics_path(self) -> Path:
        """Where outcomes are reported."""
        return self.path / METRICS

    def release(self) -> None:
        """Let the next run have it."""
        if self._lock is not None:
            self._lock.release()

    def forget(self) -> None:
        """Take back the directory of a run that could not begin, as far as it holds nothing."""
        self.release()
        trace_path = self.path / TRACE
        with suppress(OSError):
            if trace_path.stat().st_size == 0:
                trace_path.unlink()
            self.path.rmdir()

    def _refuse_another(self, resume: bool) -> None:
        if not resume and os.path.lexists(self.path / TRACE):
            raise _problem(
                self.path,
                "another run wrote there already; name a new directory, or add --eval-resume to "
                "go on with that run",
            )

    def _refuse_irregular(self) -> None:
        """A pipe in the place of a file would have its reader or writer wait for ever."""
        for name in (TRACE, METRICS):
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise _problem(self.path, f"{name}: no regular file; move it away")

    def _take_lock(self, run_id: str) -> FileLock | None:
        try:
            return FileLock(self.path / LOCK, run_id)
        except LockedError as holder:
            raise _problem(
                self.path, f"{holder} writes there; wait for it to end, or end it first"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning("%s: this file system has no locks: nothing keeps a second run out",
                        self.path)  # fmt: skip
            return None

    def _read_past(self) -> Past | None:
        trace_path = self.path / TRACE
        if not trace_path.exists():
            return None
        try:
            past = read_past(trace_path, self.metrics_path, _NODE)
        except TraceUnreadableError as error:
            raise ConfigError([f"--eval-resume: {error}"]) from None
        if not past.run_ids and not _is_first_record_torn(trace_path):
            raise ConfigError([f"--eval-resume: {trace_path} is not empty and no trace"])
        for path in (trace_path, self.metrics_path):  # now that it is known what they are
            cut = mend_tail(path)
            if cut:
                log.warning("%s: its last line was torn; %d bytes were cut off", path, cut)
        return past

    def _open_trace(self, run_id: str) -> Trace:
        past = self.past
        last = past.run_ids[-1] if past and past.run_ids else None
        return Trace(
            self.path / TRACE,
            run_id,
            _NODE,
            first_seq=past.next_seq if past else 0,
            continues=last,
            outlive_disk=True,
        )


def _problem(path: Path, text: str) -> ConfigError:
    return ConfigError([f"--eval-run-dir {path}: {text}"])


def _is_first_record_torn(trace_path: Path) -> bool:
    """Whether a run was killed in its very first ``write``, or before it."""
    with trace_path.open("rb") as file:
        begin = file.read(MAX_LINE)
    first = b'{"schema":'
    return b"\n" not in begin and begin[: len(first)] == first[: len(begin)]
