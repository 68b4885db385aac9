"""Talks with another machine over the command ``ssh``, as the user's own configuration and agent let it.

Nothing is ever asked of a person: where ssh would ask for a password or for a new host's key, it fails and says so.
"""

import contextlib
import json
import re
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

from praison_agent_rl.backoff import Backoff
from praison_agent_rl.config_fields.remote import Remote
from praison_agent_rl.errors import ConfigError, PraisonRLError, TrainingFailed
from praison_agent_rl.remote.there import MARK

T = TypeVar("T")
Body = Callable[[IO[bytes]], None]

_QUIET = ("-T", "-o", "BatchMode=yes", "-o", "RemoteCommand=none")
"""The last, since an alias may have a command for people, such as ``tmux attach``."""
_USUAL = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""After the user's options, which win over them: ssh takes what it is told first."""
_KILLED = 128
"""Above it a shell says that its command was killed, as in a shutdown; ssh itself says by 255 that there was no
connection, or that it broke."""
_NO_CONNECTION = 255
_NO_COMMAND = (126, 127)
_LONGEST_SILENCE = 300.0
"""Seconds until a login must have started Python, on a slow network disk too."""
_ADVICE = {
    "Host key verification failed": "log in there once by hand and confirm its key, or add the key to known_hosts",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "it is another machine than it was, or somebody is in between; if it "
    "was set up anew, take its old key out of known_hosts",
    "Permission denied": "put your public key there (ssh-copy-id) and load the private one (ssh-add), or name it by "
    "remote.identity; a password is never asked for",
    "Could not resolve hostname": "look at the spelling, or add the alias to ~/.ssh/config",
    "Connection refused": "no SSH server answers there; look at remote.port",
    "Connection timed out": "it is switched off, or a firewall is in between",
}


class Unreachable(PraisonRLError, ConnectionError):
    """Another machine cannot be reached over SSH, or the connection to it broke."""


class Link:
    """A machine, and the Python on it; each call is a connection of its own."""

    def __init__(self, remote: Remote) -> None:
        self.host = remote.host
        self._python = remote.python
        port = ["-p", str(remote.port)] if remote.port else []
        identity = ["-i", remote.identity] if remote.identity else []
        self._words = ["ssh", *_QUIET, *port, *identity, *remote.options, *_USUAL, "--", remote.host]

    def ask(self, words: Sequence[str], request: Any, *, body: Body | None = None) -> Any:
        """What the Python there answers when it is run with ``words`` and given a request and perhaps a body.

        Raises:
            Unreachable: there was no connection, or it broke.
            ConfigError: there is no such Python.
            TrainingFailed: what was asked failed there.
        """
        with self.talk(words, json.dumps(request).encode() + b"\n", body=body) as said:
            text = said.readline()  # a login may say something of its own behind it
            said.read()
        return json.loads(text)

    @contextlib.contextmanager
    def talk(
        self, words: Sequence[str], sent: bytes, *, body: Body | None = None, hold: bool = False
    ) -> Iterator[IO[bytes]]:
        """What the Python there says behind its mark, as it comes; raises as `ask` does.

        With ``hold`` its input stays open as long as we listen, so that it notices when we are gone.
        """
        with tempfile.TemporaryFile() as errors:
            process = self._start(words, errors)
            assert process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):  # why it ended is told by its own words
                    process.stdin.write(sent)
                    if body is not None:
                        body(process.stdin)
                    process.stdin.flush()
                    if not hold:
                        process.stdin.close()
                if not self._begins(process):
                    self._check(process, errors, always=True)
                yield process.stdout
                self._check(process, errors)
            except tarfile.TarError:  # half a parcel
                process.stdout.close()
                self._check(process, errors, always=True)
                raise
            finally:
                _end(process)

    def _start(self, words: Sequence[str], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
        # a file such as datasets.py in the folder of the login hides no package; names of files are UTF-8 on both sides
        command = f"env PYTHONSAFEPATH=1 PYTHONUTF8=1 {_for_shell(self._python)} {shlex.join(words)}"
        try:
            return subprocess.Popen(
                [*self._words, command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        except FileNotFoundError as error:
            raise ConfigError("remote needs the command ssh, which this machine has not; install OpenSSH") from error

    def _begins(self, process: "subprocess.Popen[bytes]") -> bool:
        """Read over what a login says of its own; False where nothing else comes. Raises Unreachable for silence."""
        assert process.stdout is not None
        timer, began = threading.Timer(_LONGEST_SILENCE, process.kill), time.monotonic()
        timer.start()
        try:
            found = any(line.endswith(MARK) for line in process.stdout)  # a login may say half a line
        finally:
            timer.cancel()
        if not found and time.monotonic() - began >= _LONGEST_SILENCE:
            raise Unreachable(
                f"{self.host!r} let us in and started no Python for {_LONGEST_SILENCE:.0f} s; look there for a hanging "
                "network disk, or for something in .bashrc that waits"
            )
        return found

    def _check(self, process: "subprocess.Popen[bytes]", errors: IO[bytes], *, always: bool = False) -> None:
        """Raise what the end of a call means, where it was no good one, or ``always``."""
        code = process.wait()
        if code == 0 and not always:
            return
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
        if code > _KILLED or code < 0:  # below 0 ssh was killed here
            advice = next((f"; {advice}" for sign, advice in _ADVICE.items() if sign in said), "")
            if code > _KILLED and code != _NO_CONNECTION:
                raise Unreachable(f"what was asked of {self.host!r} was killed there (exit code {code}): {_last(said)}")
            raise Unreachable(f"{self.host!r} cannot be reached: {_last(said)}{advice}")
        if code in _NO_COMMAND:
            raise ConfigError(
                f"{self.host!r} has no Python {self._python!r} that can be run ({_last(said)}); name one by "
                "remote.python, as a whole path: no shell profile is read there"
            )
        raise TrainingFailed(f"what was asked of {self.host!r} failed there (exit code {code}):\n{said[-2000:]}")


def patiently(do: Callable[[], T], on_lost: Callable[[str], None], *, sleep: Callable[[float], None] = time.sleep) -> T:
    """What ``do`` comes to; where the connection is lost it is done again, after 1 s, 2 s, and so on up to a minute."""
    backoff = Backoff()
    while True:
        try:
            with backoff.attempt():
                return do()
        except Unreachable as error:
            on_lost(f"{error}; the next try is in {backoff.seconds_left:.0f} s")
            sleep(backoff.seconds_left)


def _for_shell(path: str) -> str:
    """The path as one word of a shell, which knows the home folder."""
    home, rest = re.fullmatch(r"(~/)?(.*)", path, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    return home + shlex.quote(rest)


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "ssh gave no reason"


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not sent yet has nobody to read it
            if stream is not None:
                stream.close()
