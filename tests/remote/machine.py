"""An SSH server of the tests' own on 127.0.0.1, whose logins have another home than this process."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from praison_agent_rl.config_fields.remote import Remote

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
ForceCommand {folder}/login
LogLevel ERROR
"""
LOGIN = """\
#!/bin/sh
if [ -e '{home}/greeting' ]; then cat '{home}/greeting'; fi
cd '{home}' && exec env -i HOME='{home}' PATH=/usr/bin:/bin /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""
CLIENT = """\
Host gpubox
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
Host stranger
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/nobody
Host keyless
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/other_key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
Host silent
  HostName 127.0.0.1
  Port {free}
Host hanging
  HostName 127.0.0.1
  Port {mute}
"""


class Machine:
    """The other machine: a home, and a server that leads into it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        self.port, free = free_port(), free_port()
        self._mute = socket.socket()  # takes connections and says nothing
        self._mute.bind(("127.0.0.1", 0))
        self._mute.listen()
        for name in ("host_key", "key", "other_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        facts = {
            "port": self.port,
            "free": free,
            "mute": self._mute.getsockname()[1],
            "folder": folder,
            "home": self.home,
        }
        (folder / "server").write_text(SERVER.format(**facts))
        (folder / "client").write_text(CLIENT.format(**facts))
        (folder / "login").write_text(LOGIN.format(**facts))
        (folder / "login").chmod(0o755)
        host_key = (folder / "host_key.pub").read_text().split(" ")
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key[0]} {host_key[1]}\n")
        self._server: psutil.Process | None = None

    @contextmanager
    def serving(self) -> Iterator["Machine"]:
        """Answers until the end of the block."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # as its init script makes it, empty
        words = [str(SSHD), "-D", "-e", "-f", str(self.folder / "server")]
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log)
        self._server = psutil.Process(process.pid)
        try:
            deadline = time.monotonic() + 10
            while not answers(self.port):
                assert process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, "the server did not come up"
                time.sleep(0.05)
            yield self
        finally:
            for left in [*self.sessions(), *self.carrying()]:
                with suppress(psutil.NoSuchProcess):
                    left.kill()
            process.terminate()
            process.wait()
            self._mute.close()

    def remote(self, **given: Any) -> Remote:
        options = ["-F", str(self.folder / "client")]
        return Remote(**{"host": "gpubox", "python": sys.executable, "options": options, **given})

    def sessions(self) -> list[psutil.Process]:
        """The server's processes for connections, and those that these have started in their own sessions."""
        assert self._server is not None
        return self._server.children(recursive=True)

    def connections(self) -> list[psutil.Process]:
        """The server's own processes for connections, without what these have started."""
        return [process for process in self.sessions() if process.name().startswith("sshd")]

    def carrying(self) -> list[psutil.Process]:
        """The processes of runs, which nobody's end ends."""
        found = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
        return [one for one, words in found if "carry_out" in words and str(self.home) in " ".join(words)]

    def runs(self) -> list[Path]:
        folder = self.home / ".praison-agent-rl" / "runs"
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def holds(self, text: str) -> list[str]:
        """The files there in which the text stands."""
        files = [path for path in self.home.rglob("*") if path.is_file()]
        return [str(path) for path in files if text.encode() in path.read_bytes()]


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
