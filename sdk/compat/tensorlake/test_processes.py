"""Commands, processes, their input and output, and processes that the sandbox keeps alive."""

import pytest
from tensorlake.sandbox import (
    CommandExitReason,
    OutputMode,
    ProcessHealthCheck,
    ProcessHealthCheckType,
    ProcessStatus,
    ProcessUserSpec,
    RemoteAPIError,
    RestartPolicy,
    RestartPolicyConfig,
    SandboxError,
    StdinMode,
)
from tensorlake.sandbox.models import ManagedProcessHealthStatus, ManagedProcessStatus

from helpers import fresh_name, wait_for


def shell(box, line, **extra):
    return box.run("sh", ["-c", line], **extra)


def ended(box, process):
    """The process, once it ended."""

    def look():
        info = box.get_process(process).value
        return info if info.status != ProcessStatus.RUNNING else None

    return wait_for(f"{process} to end", look)


def test_a_command_has_output_errors_and_an_exit_code(box):
    result = shell(box, "echo out; echo more; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "out\nmore", "err")
    assert result.reason == CommandExitReason.EXITED
    assert len(result.trace_id) == 32


def test_a_command_has_the_environment_directory_and_arguments_it_was_given(box):
    line = 'echo "$GREETING"; pwd; echo "$#" "$1"'
    args = ["-c", line, "sh", "a b ü"]
    result = box.run("bash", args, env={"GREETING": "good day"}, working_dir="/usr")
    assert result.stdout == "good day\n/usr\n1 a b ü"


def test_a_command_runs_as_the_user_it_was_given(box):
    assert shell(box, "id -un; echo $HOME").stdout.splitlines()[0] == "root"
    assert shell(box, "id -un", user="tl-user").stdout == "tl-user"
    assert shell(box, "id -u; id -g", user="1000:1000").stdout == "1000\n1000"
    assert shell(box, "id -u", user=ProcessUserSpec(uid=1234, gid=1234)).stdout == "1234"
    assert shell(box, "id -un", user={"name": "tl-user"}).stdout == "tl-user"
    with pytest.raises(RemoteAPIError) as refused:
        shell(box, "true", user="nobody-of-that-name")
    assert 400 <= refused.value.status_code < 500


def test_a_command_that_takes_too_long_is_killed_with_its_children(box):
    mark = fresh_name("mark")
    result = box.run("bash", ["-c", f"(exec -a {mark} sleep 1000) & wait"], timeout=0.5)
    assert result.reason == CommandExitReason.TIMED_OUT
    assert result.exit_code < 0
    assert shell(box, f"pgrep -f '[{mark[0]}]{mark[1:]}'").stdout == ""


def test_a_command_that_a_signal_ends_says_which(box):
    result = shell(box, "kill -9 $$")
    assert (result.exit_code, result.reason) == (-9, CommandExitReason.SIGNALED)


def test_output_that_is_no_text_arrives_as_well_as_it_can(box):
    assert shell(box, r"printf 'a\377b'").stdout == "a\ufffdb"


def test_much_output_arrives_whole(box):
    lines = shell(box, "seq 1 50000").stdout.splitlines()
    assert (len(lines), lines[0], lines[-1]) == (50000, "1", "50000")


def test_a_command_reads_nothing(box):
    assert shell(box, "cat; echo done").stdout == "done"


def test_a_command_that_does_not_exist_is_an_error_that_is_not_tried_again(box):
    with pytest.raises(RemoteAPIError) as refused:
        box.run("no-such-command-anywhere")
    assert refused.value.status_code not in (502, 503, 504)
    assert "no-such-command-anywhere" in refused.value.message


def test_a_process_is_started_listed_signalled_and_its_end_is_told(box):
    started = box.start_process("sleep", ["1000"])
    assert (started.status, started.command, started.args) == ("running", "sleep", ["1000"])
    assert started.managed is None
    assert started.pid in [one.pid for one in box.list_processes()]
    assert box.send_signal(started.pid, 15).success is True
    info = ended(box, started.pid)
    assert (info.status, info.signal, info.exit_code) == (ProcessStatus.SIGNALED, 15, None)
    assert info.ended_at >= info.started_at


def test_a_signal_reaches_all_that_a_process_started(box):
    started = box.start_process("sh", ["-c", "sleep 1001 & sleep 1002 & wait"])
    children = f"pgrep -P {started.pid} | wc -l"
    wait_for("the children", lambda: shell(box, children).stdout.strip() == "2")
    box.send_signal(started.pid, 15)
    ended(box, started.pid)
    wait_for("the children to end", lambda: shell(box, "pgrep -f 'sleep 100[12]'").stdout == "")


def test_a_process_is_killed_with_all_that_it_started(box):
    started = box.start_process("sh", ["-c", "setsid sleep 1003 & trap '' TERM; sleep 1004 & wait"])
    wait_for("the children", lambda: len(shell(box, "pgrep -f 'sleep 100[34]'").stdout.split()) >= 2)
    assert box.kill_process(started.pid).value is None
    assert ended(box, started.pid).signal == 9
    wait_for("the children to end", lambda: shell(box, "pgrep -f 'sleep 100[34]'").stdout == "")


def test_a_process_is_written_to_and_read_from(box):
    started = box.start_process("cat", stdin_mode=StdinMode.PIPE)
    assert started.stdin_writable is True
    box.write_stdin(started.pid, b"one\ntwo\n")
    box.write_stdin(started.pid, b"three\n")
    box.close_stdin(started.pid)
    assert ended(box, started.pid).exit_code == 0
    output = box.get_stdout(started.pid)
    assert (output.pid, output.lines, output.line_count) == (started.pid, ["one", "two", "three"], 3)


def test_a_process_without_a_pipe_can_not_be_written_to(box):
    started = box.start_process("sleep", ["1000"])
    assert started.stdin_writable is False
    with pytest.raises(RemoteAPIError) as refused:
        box.write_stdin(started.pid, b"x")
    assert (refused.value.status_code, refused.value.code) == (400, "STDIN_NOT_WRITABLE")
    box.kill_process(started.pid)


def test_output_and_errors_are_kept_apart_and_together(box):
    started = box.start_process("sh", ["-c", "echo out; sleep 0.1; echo err >&2; exit 4"])
    assert ended(box, started.pid).exit_code == 4
    assert box.get_stdout(started.pid).lines == ["out"]
    assert box.get_stderr(started.pid).lines == ["err"]
    assert box.get_output(started.pid).lines == ["out", "err"]


def test_output_is_followed_to_its_end(box):
    line = "for n in 1 2 3; do echo out$n; echo err$n >&2; sleep 0.05; done"
    started = box.start_process("sh", ["-c", line])
    assert [event.line for event in box.follow_stdout(started.pid)] == ["out1", "out2", "out3"]
    assert [event.line for event in box.follow_stderr(started.pid)] == ["err1", "err2", "err3"]
    both = list(box.follow_output(started.pid))
    assert sorted(event.line for event in both) == ["err1", "err2", "err3", "out1", "out2", "out3"]
    assert {event.stream for event in both} == {"stdout", "stderr"}
    assert all(event.timestamp for event in both)


def test_output_that_is_discarded_is_not_kept(box):
    modes = {"stdout_mode": OutputMode.DISCARD, "stderr_mode": OutputMode.DISCARD}
    started = box.start_process("sh", ["-c", "echo out; echo err >&2"], **modes)
    ended(box, started.pid)
    assert box.get_output(started.pid).lines == []


def test_a_process_that_nobody_knows_is_not_found(box):
    for ask in (box.get_process, box.kill_process, box.get_stdout, box.close_stdin):
        for process in (4_000_000, "nobody of that name"):
            with pytest.raises(RemoteAPIError) as refused:
                ask(process)
            assert (refused.value.status_code, refused.value.code) == (404, "NOT_FOUND")


def test_the_old_keyword_for_a_process_works(box):
    started = box.start_process("sleep", ["1000"])
    assert box.get_process(pid=started.pid).pid == started.pid
    box.kill_process(pid=started.pid)


def test_a_managed_process_has_a_name_and_comes_back_when_it_dies(box):
    name = "web 1"
    policy = RestartPolicyConfig(policy=RestartPolicy.ALWAYS, initial_backoff_ms=50)
    started = box.start_process("sleep", ["1000"], name=name, restart=policy)
    assert (started.managed.name, started.managed.restart.policy) == (name, RestartPolicy.ALWAYS)
    assert started.managed.health_status == ManagedProcessHealthStatus.DISABLED
    # Not a stop by its keeper, so it comes back.
    shell(box, f"kill -9 {started.pid}")

    def is_back():
        info = box.get_process(name).value
        alive = info.status == ProcessStatus.RUNNING and info.pid != started.pid
        return info if alive and info.managed.restart_count == 1 else None

    back = wait_for("it to come back", is_back)
    assert back.managed.last_exit.signal == 9
    assert back.managed.status == ManagedProcessStatus.RUNNING
    restarted = box.restart_process(name)
    assert restarted.pid not in (started.pid, back.pid)
    box.kill_process(name)
    stopped = wait_for("it to stop", lambda: is_stopped(box, name))
    assert stopped.managed.next_restart_at is None


def is_stopped(box, name):
    try:
        info = box.get_process(name).value
    except RemoteAPIError:
        return None
    return info if info.managed.status == ManagedProcessStatus.STOPPED else None


def test_a_managed_process_that_fails_is_not_restarted_for_ever(box):
    name = fresh_name("failing")
    restart = {"policy": "on_failure", "max_restarts": 2, "initial_backoff_ms": 10}
    box.start_process("sh", ["-c", "exit 7"], name=name, restart=restart)
    stopped = wait_for("it to give up", lambda: is_stopped(box, name))
    assert stopped.managed.restart_count == 2
    assert stopped.managed.last_exit.exit_code == 7
    box.kill_process(name)


def test_only_a_managed_process_is_restarted_and_names_have_rules(box):
    started = box.start_process("sleep", ["1000"])
    with pytest.raises(RemoteAPIError) as refused:
        box.restart_process(started.pid)
    assert 400 <= refused.value.status_code < 500
    box.kill_process(started.pid)
    for name in ("12345", "a/b", ""):
        with pytest.raises((SandboxError, ValueError)):
            box.start_process("sleep", ["1000"], name=name)


def test_a_name_of_a_managed_process_is_taken_while_it_runs(box):
    name = fresh_name("taken")
    box.start_process("sleep", ["1000"], name=name)
    with pytest.raises(RemoteAPIError) as refused:
        box.start_process("sleep", ["1000"], name=name)
    assert refused.value.status_code == 409
    box.kill_process(name)


def test_a_server_is_found_healthy_and_a_dead_port_unhealthy(box):
    check = ProcessHealthCheck(
        type=ProcessHealthCheckType.HTTP, port=8123, path="/", initial_delay_ms=100, interval_ms=100
    )
    serve = ["-m", "http.server", "8123", "--bind", "127.0.0.1"]
    box.start_process("python3", serve, name="healthy", health_check=check)
    wait_for("it to be healthy", lambda: health(box, "healthy") == "healthy")
    box.kill_process("healthy")
    dead = {
        "type": "tcp",
        "port": 8124,
        "initial_delay_ms": 50,
        "interval_ms": 50,
        "timeout_ms": 50,
        "failure_threshold": 2,
    }
    never = {"policy": "never"}
    box.start_process("sleep", ["1000"], name="sick", health_check=dead, restart=never)
    wait_for("it to be unhealthy", lambda: health(box, "sick") == "unhealthy")
    box.kill_process("sick")


def health(box, name):
    return box.get_process(name).managed.health_status.value


def test_a_process_that_turns_unhealthy_is_restarted(box):
    check = {
        "type": "tcp",
        "port": 8125,
        "initial_delay_ms": 50,
        "interval_ms": 50,
        "timeout_ms": 50,
        "failure_threshold": 2,
    }
    restart = {"policy": "always", "initial_backoff_ms": 10}
    name = fresh_name("restless")
    box.start_process("sleep", ["1000"], name=name, health_check=check, restart=restart)
    wait_for("a restart", lambda: box.get_process(name).managed.restart_count >= 1)
    box.kill_process(name)


def test_the_daemon_inside_is_healthy_and_counts_its_processes(box):
    assert box.health().healthy is True
    before = box.daemon_info()
    started = box.start_process("sleep", ["1000"])
    after = box.daemon_info()
    assert after.running_processes == before.running_processes + 1
    assert after.total_processes > before.total_processes
    assert after.version
    box.kill_process(started.pid)
