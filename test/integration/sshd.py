"""Several machines on one: an SSH daemon on each of 127.0.0.2, 127.0.0.3, … with keys of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from pathlib import Path

CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 64
"""


class Daemons:
    """Running daemons; ``ssh`` is the command that reaches them."""

    def __init__(self, folder: Path, number: int) -> None:
        binary = shutil.which("sshd") or "/usr/sbin/sshd"
        assert Path(binary).exists(), "sshd is not installed: apt-get install openssh-server"
        folder.mkdir(parents=True)
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the daemon's, for privilege separation
        self.hosts = [f"127.0.0.{number + 2}" for number in range(number)]
        self.port = _free_port()
        self._running = [self._start(binary, folder, address) for address in self.hosts]
        options = (
            f"-p {self.port} -i {folder}/user_key -o UserKnownHostsFile={folder}/known_hosts -o IdentitiesOnly=yes"
        )
        self.ssh = f"ssh {options}"
        for address in self.hosts:
            self._wait_for(address, folder)

    def close(self) -> None:
        for daemon in self._running:
            daemon.terminate()
            daemon.wait()

    def kill(self, host: str) -> None:
        """The machine is off the network: no new connections."""
        daemon = self._running[self.hosts.index(host)]
        daemon.terminate()
        daemon.wait()

    def _start(self, binary: str, folder: Path, address: str) -> subprocess.Popen[bytes]:
        config = folder / f"sshd-{address}.conf"
        config.write_text(CONFIG.format(port=self.port, address=address, folder=folder))
        log = open(folder / f"sshd-{address}.log", "wb")  # noqa: SIM115  (the daemon's as long as it runs)
        return subprocess.Popen([binary, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=log)

    def _wait_for(self, address: str, folder: Path) -> None:
        deadline = time.monotonic() + 30
        command = [
            *shlex.split(self.ssh),
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=accept-new",
            address,
            "true",
        ]
        while subprocess.run(command, capture_output=True, check=False).returncode != 0:
            log = (folder / f"sshd-{address}.log").read_text()
            assert time.monotonic() < deadline, f"the daemon of {address} does not let us in: {log}"
            time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return int(probe.getsockname()[1])
