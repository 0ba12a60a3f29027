//! Java trusts what is in a store of its own, which only its `keytool` can write. That takes a second
//! or more, so it is done by and by, and whoever starts at once may be too early.
//!
//! Invariants:
//! - One at a time: the tool rewrites the whole store.
//! - [`NOTED`] says which stores have which certificates, so that nothing is done twice.
//! - The tool gets no right that those who may change the store have not got.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use torpor_protocol::guest::{Exit, ProcessSpec};

use super::bundle;
use super::certificate::Certificate;
use super::stores::OURS;
use crate::agent::Agent;
use crate::identity::replace;
use crate::process::{Bystander, PATH};

type Environment = BTreeMap<String, String>;

/// Stores that hold our certificates: their fingerprints, with commas, and the path, a line each.
const NOTED: &str = "/etc/torpor/java";
/// Where distributions have the store: Debian, Red Hat.
const STORES: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/java/cacerts"];
/// Where it is in a Java, since version 9 and before.
const IN_JAVA: [&str; 2] = ["lib/security/cacerts", "jre/lib/security/cacerts"];
/// The certificate that the tool reads next.
const IMPORT: &str = "/etc/torpor/import.pem";
/// What everybody calls ours (those after the first have a number, too), and the password that all
/// these stores have.
const ALIAS: &str = "torpor";
const PASSWORD: &str = "changeit";
/// A tool that takes longer hangs: it needs a second or two where processors are free.
const TOOL_MAX: Duration = Duration::from_secs(120);

/// Puts the certificates into all stores that are there, some time.
pub(super) fn learn(agent: &Rc<Agent>, env: &Environment, certificates: Vec<Certificate>) {
    let stores = stores(env);
    if stores.is_empty() {
        return;
    }
    let Some(tool) = tool(env) else { return };
    let fingerprints: Vec<_> = certificates.iter().map(Certificate::fingerprint).collect();
    let (agent, fingerprints) = (Rc::clone(agent), fingerprints.join(","));
    tokio::task::spawn_local(async move {
        let _one_at_a_time = agent.keystores.lock().await;
        let mut noted = noted();
        for store in stores {
            if noted.get(&store) == Some(&fingerprints) {
                continue;
            }
            if let Some(before) = noted.remove(&store) {
                delete(&agent, &tool, &store, &before).await;
            }
            if import(&agent, &tool, &store, &certificates).await {
                noted.insert(store, fingerprints.clone());
            } else {
                let complaint =
                    format!("{store} does not have the CA certificates: keytool failed");
                agent.lines.note(&complaint);
            }
        }
        let _ = fs::remove_file(IMPORT);
        note(&noted);
    });
}

async fn import(agent: &Agent, tool: &str, store: &str, certificates: &[Certificate]) -> bool {
    for (index, certificate) in certificates.iter().enumerate() {
        if replace(Path::new(IMPORT), certificate.pem().as_bytes(), None).is_err() {
            return false;
        }
        let order = ["-importcert", "-noprompt", "-trustcacerts", "-file", IMPORT];
        if !run(agent, tool, store, &alias(index), &order).await {
            return false;
        }
    }
    true
}

/// As many as there are fingerprints.
async fn delete(agent: &Agent, tool: &str, store: &str, fingerprints: &str) -> bool {
    let mut done = true;
    for index in 0..fingerprints.split(',').count() {
        done &= run(agent, tool, store, &alias(index), &["-delete"]).await;
    }
    done
}

fn alias(index: usize) -> String {
    if index == 0 { ALIAS.to_owned() } else { format!("{ALIAS}-{index}") }
}

/// Takes them out of all stores that have them, some time.
pub(super) fn forget(agent: &Rc<Agent>, env: &Environment) {
    if fs::symlink_metadata(NOTED).is_err() && agent.keystores.try_lock().is_ok() {
        return;
    }
    let Some(tool) = tool(env) else { return };
    let agent = Rc::clone(agent);
    tokio::task::spawn_local(async move {
        let _one_at_a_time = agent.keystores.lock().await;
        for (store, fingerprints) in noted() {
            if !delete(&agent, &tool, &store, &fingerprints).await {
                agent.lines.note(&format!("{store} still has the CA certificates: keytool failed"));
            }
        }
        note(&BTreeMap::new());
    });
}

/// The stores of the image, each once.
fn stores(env: &Environment) -> BTreeSet<String> {
    let home = java_home(env);
    let in_home = IN_JAVA.iter().filter_map(|inside| Some(home?.join(inside)));
    let all = STORES.iter().map(PathBuf::from).chain(in_home);
    // Links lead from one to the other. A path that is no text can't be noted.
    let there =
        all.filter_map(|place| fs::canonicalize(place).ok()).filter(|place| place.is_file());
    there.filter_map(|place| place.into_os_string().into_string().ok()).collect()
}

fn java_home(env: &Environment) -> Option<&Path> {
    env.get("JAVA_HOME").map(Path::new).filter(|home| home.is_absolute())
}

fn tool(env: &Environment) -> Option<String> {
    let path = env.get("PATH").map_or(PATH, String::as_str);
    let homes =
        java_home(env).into_iter().flat_map(|home| [home.join("bin"), home.join("jre/bin")]);
    let mut tools = homes.chain(path.split(':').map(PathBuf::from)).map(|it| it.join("keytool"));
    let tool = tools.find(|tool| tool.is_absolute() && tool.is_file())?;
    tool.into_os_string().into_string().ok()
}

/// Whether the tool did it.
async fn run(agent: &Agent, tool: &str, store: &str, alias: &str, order: &[&str]) -> bool {
    let (Ok(program), Ok(owned)) = (fs::metadata(tool), fs::metadata(store)) else { return false };
    // Whoever has the store may have put anything in place of the tool.
    if ![0, owned.uid()].contains(&program.uid()) {
        return false;
    }
    let rest = ["-alias", alias, "-keystore", store, "-storepass", PASSWORD];
    let words = [tool].into_iter().chain(order.iter().copied()).chain(rest);
    let spec = ProcessSpec {
        command: words.map(str::to_owned).collect(),
        cwd: Some("/".to_owned()),
        user: (owned.uid() != 0).then(|| owned.uid().to_string()),
        ..ProcessSpec::default()
    };
    let null = agent.null.as_fd();
    let Ok(mut process) = Bystander::start(agent, &spec, [null; 3]) else { return false };
    let ended = tokio::time::timeout(TOOL_MAX, process.ended()).await;
    if ended.is_err() {
        process.kill().await;
    }
    ended == Ok(Exit::Code { code: 0 })
}

fn noted() -> BTreeMap<String, String> {
    let text = bundle::read(Path::new(NOTED)).map(|(text, _)| text).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.map(|(fingerprint, store)| (store.to_owned(), fingerprint.to_owned())).collect()
}

/// What can't be noted is done again, or stays.
fn note(stores: &BTreeMap<String, String>) {
    if stores.is_empty() {
        let _ = fs::remove_file(NOTED);
        // Unless something else of ours is in it.
        let _ = fs::remove_dir(OURS);
        return;
    }
    let lines = stores.iter().map(|(store, fingerprint)| format!("{fingerprint} {store}\n"));
    let _ = replace(Path::new(NOTED), lines.collect::<String>().as_bytes(), None);
}
