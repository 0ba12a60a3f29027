//! The agent as PID 1: the real program, in namespaces of its own.

use std::process::Command;

use torpor_protocol::guest::{Exit, Identity, ProcessSpec, Reply, Request};

use crate::client::{Daemon, command, env, eventually, sh};

/// Something like a machine: own processes, own hostname, own /etc, /run and /usr/local/share, and
/// the agent at /run/bin/sudo too, which `user` may use and `stranger` may not; none without root.
pub(crate) fn machine() -> Option<Daemon> {
    Some(Daemon::with_machine(machine_command(":")?))
}

/// The same, not started yet; `before` is done in it first.
pub(crate) fn machine_command(before: &str) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can make a machine");
        return None;
    }
    let script = "mount -t tmpfs none /etc && mount -t tmpfs none /run && \\
        mount -t tmpfs none /usr/local/share && cd /etc && \\
        printf 'root:x:0:0::/:/bin/sh\\nuser:x:1000:1000::/tmp:/bin/sh\\n' > passwd && \\
        printf 'stranger:x:1001:1001::/tmp:/bin/sh\\n' >> passwd && \\
        printf 'sudo:x:27:user\\n' > group && \\
        mkdir /run/bin && cp \"$0\" /run/bin/sudo && chmod -R 755 /run/bin && \\
        ln -s /run/elsewhere resolv.conf";
    let script = format!("{script} && {{ {before}; }} && exec \"$0\"");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--uts", "--mount", "--mount-proc"]);
    command.args(["sh", "-c", &script, env!("CARGO_BIN_EXE_torpor-agent")]);
    Some(command)
}

pub(crate) fn identity(hostname: &str) -> Identity {
    Identity {
        hostname: hostname.into(),
        nameservers: vec!["10.0.0.53".into()],
        env: env(&[("FROM", "identity")]),
        user: None,
        workdir: None,
        entropy: "00ff".into(),
        boot_id: None,
        ca: None,
        extra_ca: Vec::new(),
    }
}

#[test]
fn a_machine_becomes_who_it_is_told_to_be() {
    let Some(mut daemon) = machine() else { return };
    for name in ["one", "two"] {
        assert_eq!(daemon.ask(&Request::Identify(identity(name))), Ok(Reply::Done));
        let ran =
            daemon.run(sh("hostname; cat /etc/hostname /etc/resolv.conf; grep torpor /etc/hosts"));
        let expected = format!("{name}\n{name}\nnameserver 10.0.0.53\n127.0.1.1 {name} # torpor\n");
        assert_eq!(ran.text(), expected);
    }
    assert_eq!(daemon.run(sh("echo $FROM")).text(), "identity\n");
}

#[test]
fn a_fork_gets_names_of_its_own_and_a_waker_keeps_them() {
    let Some(mut daemon) = machine() else { return };
    let names =
        sh("stat -c '%U %a' /run/torpor/boot_id; cat /run/torpor/boot_id /etc/machine-id; \
         cat /proc/sys/kernel/random/boot_id");
    let mut boots = [
        Some("01234567-89ab-4cde-8f01-23456789abcd"),
        None,
        Some("FFFFFFFF-89AB-4CDE-8F01-23456789ABCD"),
    ];
    let mut shown = boots.map(|boot| {
        let boot_id = boot.map(str::to_owned);
        let identity = Identity { boot_id, ..identity("one") };
        assert_eq!(daemon.ask(&Request::Identify(identity)), Ok(Reply::Done));
        daemon.run(names.clone()).text().to_owned()
    });
    boots[1] = boots[0];
    for (boot, shown) in boots.iter().flatten().zip(&mut shown) {
        let boot = boot.to_lowercase();
        assert_eq!(*shown, format!("root 644\n{boot}\n{}\n{boot}\n", boot.replace('-', "")));
    }
}

#[test]
fn no_program_inside_may_administer_the_machine() {
    let Some(mut daemon) = machine() else { return };
    let ran = daemon
        .run(sh("mount -t tmpfs none /mnt 2>/dev/null || hostname evil 2>/dev/null || echo no"));
    assert_eq!(ran.text(), "no\n");
    let peek = "ls /proc/1/fd 2>/dev/null || echo no";
    let user = ProcessSpec { user: Some("user".into()), ..sh(peek) };
    assert_eq!(daemon.run(user).text(), "no\n");
}

#[test]
fn orphans_of_the_machine_are_reaped() {
    let Some(mut daemon) = machine() else { return };
    for _ in 0..20 {
        daemon.run(sh("(sleep 0.05 &) ; setsid sh -c 'true &'"));
    }
    eventually("nobody but the agent and the looker is left", || {
        let count = daemon.run(sh("ls -d /proc/[0-9]* | wc -l"));
        (count.text().trim().parse::<u32>().unwrap() <= 4).then_some(())
    });
}

#[test]
fn the_machine_ends_when_the_daemon_is_gone() {
    let Some(mut daemon) = machine() else { return };
    let ran = daemon.run(command(&["true"]));
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
    daemon.start(command(&["sleep", "1000"]));
    daemon.hang_up().unwrap();
}
