"""The command line program `tl` of the last package that has it in."""

import fcntl
import json
import os
import pty as terminals
import re
import select
import struct
import subprocess
import termios
import time

import pytest
from tensorlake.sandbox import Sandbox, SandboxStatus

from helpers import PATIENCE, fresh_name, lifecycle


@pytest.fixture
def environment(world, tmp_path):
    """With a home of its own, so that nobody's settings are read or written."""
    return {
        **os.environ,
        "HOME": str(tmp_path),
        "NO_COLOR": "1",
        "TENSORLAKE_SANDBOX_PROXY_URL": world.daemon.url,
    }


@pytest.fixture
def cli(tl, environment, tmp_path):
    """Runs `tl sbx …` and returns what it printed."""

    def run(*args, code=0, group="sbx", **extra):
        done = subprocess.run(
            [tl, group, *args],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            stdin=subprocess.DEVNULL,
            **extra,
        )
        assert done.returncode == code, f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def named(cli):
    """A named sandbox, made by the program."""
    name = fresh_name("cli")
    cli("new", name)
    return name


def test_a_sandbox_is_made_listed_described_and_terminated(cli):
    name = fresh_name("cli")
    cli("new", name, "--cpus", "1", "--memory", "1024", "--timeout", "300", "--expose", "8080")
    box = Sandbox.connect(name)
    assert (box.info().timeout_secs, box.info().exposed_ports) == (300, [8080])
    assert name in cli("ls")
    assert box.sandbox_id in cli("ls", "--quiet").split()
    assert box.sandbox_id in cli("describe", name)
    cli("terminate", name)
    assert box.sandbox_id not in cli("ls", "--quiet").split()
    assert box.sandbox_id in cli("ls", "--archived", "--quiet")


def test_a_command_is_run_with_its_output_and_exit_code(cli, named):
    assert cli("exec", named, "echo", "hello") == "hello\n"
    args = ("--env", "A=1", "--workdir", "/usr", named, "sh", "-c", "echo $A; pwd")
    assert cli("exec", *args) == "1\n/usr\n"
    cli("exec", named, "sh", "-c", "exit 5", code=5)
    assert cli("exec", "--user", "tl-user", named, "id", "-un") == "tl-user\n"


def test_a_sandbox_is_made_for_one_command_and_gone_after_it(cli, nothing_leaked):
    assert "only once" in cli("run", "echo", "only once")


def test_processes_are_started_listed_restarted_and_killed(cli, named):
    cli("exec", "--detach", "--name", "nap", "--restart", "always", named, "sleep", "1000")
    listed = json.loads(cli("ps", named, "--json"))
    processes = listed["processes"] if isinstance(listed, dict) else listed
    assert [one["managed"]["name"] for one in processes] == ["nap"]
    before = Sandbox.connect(named).get_process("nap").pid
    cli("restart", named, "nap")
    assert Sandbox.connect(named).get_process("nap").pid != before
    cli("kill", named, "nap")


def test_files_are_copied_in_and_out(cli, named, tmp_path):
    (tmp_path / "local").write_text("carried\n")
    cli("cp", str(tmp_path / "local"), f"{named}:/tmp/there")
    assert Sandbox.connect(named).read_file("/tmp/there").value == b"carried\n"
    cli("cp", f"{named}:/tmp/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "carried\n"


def test_a_sandbox_is_suspended_and_resumed(cli, named):
    cli("suspend", named)
    assert Sandbox.connect(named).status == SandboxStatus.SUSPENDED
    assert named in cli("ls", "--suspended")
    cli("resume", named)
    assert Sandbox.connect(named).status == SandboxStatus.RUNNING


def test_a_checkpoint_is_taken_listed_begun_from_and_removed(cli, named):
    Sandbox.connect(named).write_file("/root/note", b"saved")
    cli("checkpoint", named, "--checkpoint-type", "memory")
    (snapshot,) = Sandbox.connect(named).list_snapshots()
    assert snapshot.snapshot_id in cli("checkpoint", "ls")
    fork = fresh_name("fork")
    cli("new", fork, "--snapshot", snapshot.snapshot_id)
    assert cli("exec", fork, "cat", "/root/note").strip() == "saved"
    cli("checkpoint", "rm", snapshot.snapshot_id)
    assert list(Sandbox.connect(named).list_snapshots()) == []


def test_a_sandbox_is_copied(cli, named):
    cli("copy", named, "--times", "2")
    assert len(cli("ls", "--quiet").split()) >= 3


def test_ports_are_exposed_listed_and_removed(cli, named):
    cli("port", "expose", named, "8080", "9090")
    info = Sandbox.connect(named).info()
    assert (info.exposed_ports, info.allow_unauthenticated_access) == ([8080, 9090], True)
    assert {"8080", "9090"} <= set(re.findall(r"\d+", cli("port", "ls", named)))
    cli("port", "rm", named, "8080")
    assert Sandbox.connect(named).info().exposed_ports == [9090]


def test_a_sandbox_gets_a_name(cli, named):
    renamed = fresh_name("renamed")
    cli("name", named, renamed)
    assert Sandbox.connect(renamed).name == renamed


def test_logs_are_read(cli, named):
    cli("exec", "--detach", named, "echo", "a line for the logs")
    end = time.monotonic() + PATIENCE
    while "a line for the logs" not in cli("logs", named):
        assert time.monotonic() < end
    assert "echo" in cli("logs", "streams", named)


def test_a_shell_is_used_by_hand(tl, environment, named):
    child, terminal = terminals.fork()
    if child == 0:
        # A terminal that somebody sits at has a size; this one has none yet.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        os.execve(tl, [str(tl), "sbx", "ssh", named], environment)
    seen = Terminal(terminal)
    try:
        seen.waits_for(rb"[#$] ")
        seen.types(b"echo typed-$((40 + 2))\n")
        seen.waits_for(rb"typed-42")
        seen.types(b"stty size\n")
        seen.waits_for(rb"30 100")
        seen.types(b"exit\n")
        seen.waits_for_end()
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Terminal:
    """Our end of a terminal that a program runs in."""

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.seen = b""

    def types(self, data):
        os.write(self.descriptor, data)

    def read(self):
        """Reads once; false at the end."""
        ready, _, _ = select.select([self.descriptor], [], [], PATIENCE)
        assert ready, f"nothing came for {PATIENCE} s after {self.seen[-500:]!r}"
        try:
            data = os.read(self.descriptor, 4096)
        except OSError:  # Linux says so when the other end is closed.
            data = b""
        self.seen += data
        return bool(data)

    def waits_for(self, pattern):
        while not re.search(pattern, self.seen):
            assert self.read(), f"it ended after {self.seen[-500:]!r}"

    def waits_for_end(self):
        while self.read():
            pass


def test_terminals_are_listed_and_removed(cli, named):
    session = Sandbox.connect(named).create_pty_session("sh").value["session_id"]
    assert session in cli("pty", "ls", named)
    cli("pty", "rm", named, session)
    assert session not in [
        one["session_id"] for one in json_list(cli("pty", "ls", named, "--json")) if one.get("is_alive")
    ]


def json_list(text):
    told = json.loads(text)
    return told["sessions"] if isinstance(told, dict) else told


def test_secrets_are_listed_by_name(cli):
    made = lifecycle("POST", "/secrets", body={"name": "CLI_TOKEN", "value": "unseen-value"}).json()
    listed = cli("ls", group="secrets")
    lifecycle("DELETE", f"/secrets/{made['id']}")
    assert "CLI_TOKEN" in listed
    assert "unseen-value" not in listed


def test_who_asks_is_told_who_it_is(cli):
    assert cli(group="whoami")


def test_a_sandbox_that_nobody_knows_is_an_error_in_words(tl, environment):
    done = subprocess.run(
        [tl, "sbx", "describe", "nobody-of-this-name"], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "not" in done.stderr.lower()
