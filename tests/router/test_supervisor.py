"""The supervisor against small scripts in the place of shards."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAIT_FOR_PARENT = "import sys; print('up', flush=True); sys.stdin.read()"


class Supervisor:
    def __init__(self, *scripts: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "router.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        order = {"commands": [[sys.executable, "-c", script] for script in scripts], "env": env or {}, "group": 0}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def event(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        event: dict[str, Any] = json.loads(self.process.stdout.readline())
        return event

    def close(self) -> str:
        """Ends it as the router's death would; returns what it wrote to standard error."""
        _, errors = self.process.communicate(timeout=30)
        return errors.decode()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


def test_an_ended_shard_is_reported_with_its_code_and_last_lines() -> None:
    supervisor = Supervisor(
        "import sys; print('loading', flush=True); print('FATAL: no such tensor', file=sys.stderr); sys.exit(3)"
    )
    assert supervisor.event()["rank"] == 0
    assert supervisor.event() == {
        "group": 0,
        "rank": 0,
        "returncode": 3,
        "last_lines": ["loading", "FATAL: no such tensor"],
    }
    errors = supervisor.close()
    assert "[shard 0] FATAL: no such tensor" in errors


def test_a_killed_shard_is_reported_by_signal_and_the_others_live_on() -> None:
    supervisor = Supervisor(WAIT_FOR_PARENT, WAIT_FOR_PARENT)
    first, second = supervisor.event(), supervisor.event()
    os.kill(first["pid"], signal.SIGKILL)
    ended = supervisor.event()
    assert (ended["rank"], ended["returncode"]) == (first["rank"], -signal.SIGKILL)
    assert is_running(second["pid"])
    supervisor.close()
    assert wait_gone(second["pid"])


def test_the_end_of_standard_input_ends_every_shard_even_one_that_ignores_sigterm() -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    supervisor = Supervisor(stubborn)
    pid = supervisor.event()["pid"]
    supervisor.close()
    assert wait_gone(pid)


def test_killing_the_supervisor_itself_ends_shards_that_watch_their_input() -> None:
    supervisor = Supervisor(WAIT_FOR_PARENT)
    pid = supervisor.event()["pid"]
    supervisor.process.kill()
    supervisor.close()
    assert wait_gone(pid)


def test_a_term_signal_does_not_end_the_shards() -> None:
    supervisor = Supervisor(WAIT_FOR_PARENT)
    pid = supervisor.event()["pid"]
    os.kill(supervisor.process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert is_running(pid)
    supervisor.close()


def test_the_environment_of_the_order_reaches_the_shards() -> None:
    supervisor = Supervisor("import os; print(os.environ['GLOO_SOCKET_IFNAME'])", env={"GLOO_SOCKET_IFNAME": "lo"})
    supervisor.event()
    assert supervisor.event()["last_lines"] == ["lo"]
    supervisor.close()
