//! CA certificates that everybody inside trusts: the real program, in namespaces of its own.

use torpor_protocol::guest::{FailureCode, Identity, LogLine, ProcessSpec, Reply, Request};

use crate::client::{Daemon, env, eventually, sh};
use crate::init::{identity, machine};
use crate::lines::lines;

const ONE: &str = include_str!("../certificates/one.pem");
const OTHER: &str = include_str!("../certificates/other.pem");
/// A Java whose tool only says what it was told, and fails when it is to.
const JAVA: &str = "mkdir -p /run/java/bin /run/java/lib/security && cd /run/java && \
    touch lib/security/cacerts && \
    printf '#!/bin/sh\\n[ ! -e /run/java/broken ] && echo \"$1\" >> /run/java/told\\n' > bin/keytool && \
    chmod 755 bin/keytool";

fn trusting(ca: Option<&str>) -> Identity {
    Identity { ca: ca.map(str::to_owned), ..identity("one") }
}

fn become_(daemon: &mut Daemon, identity: Identity) {
    assert_eq!(daemon.ask(&Request::Identify(identity)), Ok(Reply::Done));
}

/// What the agent says of a tool that failed.
fn complaint(daemon: &mut Daemon) -> LogLine {
    eventually("the agent says so", || {
        lines(daemon, 0).0.into_iter().find(|line| line.text.contains("keytool failed"))
    })
}

#[test]
fn processes_are_told_whom_to_trust_unless_somebody_says_otherwise() {
    let Some(mut daemon) = machine() else { return };
    daemon
        .run(sh("mkdir -p /etc/ssl/certs && echo '# theirs' > /etc/ssl/certs/ca-certificates.crt"));
    let show = "echo $SSL_CERT_FILE $NODE_EXTRA_CA_CERTS $CURL_CA_BUNDLE $PIP_CERT";
    let chosen = ProcessSpec { env: env(&[("PIP_CERT", "/process")]), ..sh(show) };
    let own = env(&[("CURL_CA_BUNDLE", "/image")]);
    become_(&mut daemon, Identity { env: own.clone(), ..trusting(Some(ONE)) });
    let told = "/etc/torpor/authorities.pem /etc/torpor/authority.pem /image /process\n";
    assert_eq!(daemon.run(chosen.clone()).text(), told);
    let by_sudo = ProcessSpec { user: Some("user".into()), ..sh("/run/bin/sudo env") };
    let by_sudo = daemon.run(by_sudo);
    assert!(by_sudo.text().contains("REQUESTS_CA_BUNDLE=/etc/torpor/authorities.pem\n"));
    assert_eq!(daemon.run(sh("cat $NODE_EXTRA_CA_CERTS")).text(), ONE);
    let count = sh("grep -c BEGIN.CERT $SSL_CERT_FILE");
    assert_eq!(daemon.run(count.clone()).text(), "1\n");
    become_(&mut daemon, trusting(Some(OTHER)));
    assert_eq!(daemon.run(count).text(), "1\n");
    become_(&mut daemon, Identity { env: own, ..trusting(None) });
    assert_eq!(daemon.run(chosen).text(), "/image /process\n");
    let left = "ls /etc/torpor /etc/ssl/certs; cat /etc/ssl/certs/*";
    let expected =
        "/etc/ssl/certs:\nca-certificates.crt\n\n/etc/torpor:\nauthorities.pem\n# theirs\n";
    assert_eq!(daemon.run(sh(left)).text(), expected);
}

#[test]
fn cas_of_the_operator_are_trusted_besides_each_once() {
    let Some(mut daemon) = machine() else { return };
    daemon
        .run(sh("mkdir -p /etc/ssl/certs && echo '# theirs' > /etc/ssl/certs/ca-certificates.crt"));
    let extra_ca = vec![ONE.to_owned(), OTHER.to_owned()];
    become_(&mut daemon, Identity { extra_ca, ..trusting(Some(ONE)) });
    assert_eq!(daemon.run(sh("cat $NODE_EXTRA_CA_CERTS")).text(), [ONE, OTHER].concat());
    let count = sh("grep -c BEGIN.CERT $SSL_CERT_FILE");
    assert_eq!(daemon.run(count.clone()).text(), "2\n");
    become_(&mut daemon, Identity { extra_ca: vec![OTHER.to_owned()], ..trusting(None) });
    assert_eq!(daemon.run(count).text(), "1\n");
    become_(&mut daemon, trusting(None));
    let left = daemon.run(sh("cat /etc/ssl/certs/*; echo $PIP_CERT"));
    assert_eq!(left.text(), "# theirs\n\n");
}

#[test]
fn what_is_no_certificate_changes_nothing() {
    let Some(mut daemon) = machine() else { return };
    become_(&mut daemon, trusting(Some(ONE)));
    let wrong = Identity { hostname: "two".into(), ..trusting(Some("trust me")) };
    let refused = daemon.ask(&Request::Identify(wrong)).unwrap_err();
    assert_eq!(refused.code, FailureCode::Invalid);
    assert_eq!(daemon.run(sh("hostname; cat $NODE_EXTRA_CA_CERTS")).text(), format!("one\n{ONE}"));
}

#[test]
fn a_java_hears_of_it_once_and_of_every_change() {
    let Some(mut daemon) = machine() else { return };
    daemon.run(sh(JAVA));
    let home = |trust| Identity { env: env(&[("JAVA_HOME", "/run/java")]), ..trusting(trust) };
    let told = |daemon: &mut Daemon, expected: &str| {
        eventually("the tool was told", || {
            let told = daemon.run(sh("cat /run/java/told; cut -d' ' -f2 /etc/torpor/java"));
            (told.text() == expected).then_some(())
        });
    };
    let store = "/run/java/lib/security/cacerts\n";
    become_(&mut daemon, home(Some(ONE)));
    told(&mut daemon, &format!("-importcert\n{store}"));
    become_(&mut daemon, home(Some(ONE)));
    become_(&mut daemon, home(Some(OTHER)));
    told(&mut daemon, &format!("-importcert\n-delete\n-importcert\n{store}"));
    become_(&mut daemon, home(None));
    told(&mut daemon, "-importcert\n-delete\n-importcert\n-delete\n");
}

#[test]
fn a_java_that_can_not_learn_it_is_only_told_of() {
    let Some(mut daemon) = machine() else { return };
    daemon.run(sh(JAVA));
    daemon.run(sh("touch /run/java/broken"));
    let env = env(&[("JAVA_HOME", "/run/java")]);
    become_(&mut daemon, Identity { env, ..trusting(Some(ONE)) });
    assert_eq!(complaint(&mut daemon).command, "torpor-agent");
}

#[test]
fn a_tool_of_a_user_gets_no_right_of_roots() {
    let Some(mut daemon) = machine() else { return };
    daemon.run(sh(JAVA));
    // The store is root's, the tool a user's: it could be anything.
    daemon.run(sh("chown 1000 /run/java/bin/keytool; chmod 777 /run/java"));
    let env = env(&[("JAVA_HOME", "/run/java")]);
    become_(&mut daemon, Identity { env: env.clone(), ..trusting(Some(ONE)) });
    complaint(&mut daemon);
    // Both are the user's: so is the process.
    daemon.run(sh("chown 1000 /run/java/lib/security/cacerts"));
    become_(&mut daemon, Identity { env, ..trusting(Some(OTHER)) });
    let owner = sh("stat -c %u /run/java/told 2>/dev/null || echo nobody");
    eventually("the user's tool ran", || {
        (daemon.run(owner.clone()).text() == "1000\n").then_some(())
    });
}
