"""A process of its own that is asked by lines of JSON, so that what it runs can neither hurt nor hold up who asks."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


class LineProcess:
    """Runs ``script``, which answers each line with one; started when needed, and again when an answer ended it."""

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self._script = script
        self._environment = dict(environment or {})
        self._one_at_a_time = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def line_for(self, request: dict[str, Any]) -> str:
        """The line that answers a request; empty if the process ended over it."""
        with self._one_at_a_time:
            if self._process and self._process.poll() is not None:  # ended by somebody else
                self.close()
            process = self._process or self._start()
            line = ""
            try:
                if process.stdin and process.stdout:
                    process.stdin.write(json.dumps(request) + "\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
            except OSError:  # it ended before it read
                pass
            finally:
                if not line:  # also where we are stopped: the answer to come would be taken for the next one's
                    self.close()
            return line

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process and os.getpid() == self._owner:  # a fork that ends leaves its parent's alone
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not sent yet has nobody to read it
                    if stream:
                        stream.close()

    def _start(self) -> "subprocess.Popen[str]":
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUTF8": "1", **self._environment},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        return self._process
