//! Java trusts what is in a store of its own, which only its `keytool` can write. That takes a second
//! or more, so it is done by and by, and whoever starts at once may be too early.
//!
//! Invariants:
//! - One at a time: the tool rewrites the whole store.
//! - [`NOTED`] says which stores have which certificate, so that nothing is done twice.
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
use super::stores::{AUTHORITY, OURS};
use crate::agent::Agent;
use crate::identity::replace;
use crate::process::{Bystander, PATH};

type Environment = BTreeMap<String, String>;

/// Stores that hold our certificate: its fingerprint and the path, a line each.
const NOTED: &str = "/etc/torpor/java";
/// Where distributions have the store: Debian, Red Hat.
const STORES: [&str; 2] = ["/etc/ssl/certs/java/cacerts", "/etc/pki/java/cacerts"];
/// Where it is in a Java, since version 9 and before.
const IN_JAVA: [&str; 2] = ["lib/security/cacerts", "jre/lib/security/cacerts"];
/// What everybody calls ours, and the password that all these stores have.
const ALIAS: &str = "torpor";
const PASSWORD: &str = "changeit";
/// A tool that takes longer hangs: it needs a second or two where processors are free.
const TOOL_MAX: Duration = Duration::from_secs(120);

/// Puts the certificate into all stores that are there, some time.
pub(super) fn learn(agent: &Rc<Agent>, env: &Environment, certificate: &Certificate) {
    let stores = stores(env);
    if stores.is_empty() {
        return;
    }
    let Some(tool) = tool(env) else { return };
    let (agent, fingerprint) = (Rc::clone(agent), certificate.fingerprint());
    tokio::task::spawn_local(async move {
        let _one_at_a_time = agent.keystores.lock().await;
        let mut noted = noted();
        for store in stores {
            if noted.get(&store) == Some(&fingerprint) {
                continue;
            }
            if noted.remove(&store).is_some() {
                run(&agent, &tool, &store, &["-delete"]).await;
            }
            let import = ["-importcert", "-noprompt", "-trustcacerts", "-file", AUTHORITY];
            if run(&agent, &tool, &store, &import).await {
                noted.insert(store, fingerprint.clone());
            } else {
                agent.lines.note(&format!("{store} does not have the certificate: keytool failed"));
            }
        }
        note(&noted);
    });
}

/// Takes it out of all stores that have it, some time.
pub(super) fn forget(agent: &Rc<Agent>, env: &Environment) {
    if fs::symlink_metadata(NOTED).is_err() && agent.keystores.try_lock().is_ok() {
        return;
    }
    let Some(tool) = tool(env) else { return };
    let agent = Rc::clone(agent);
    tokio::task::spawn_local(async move {
        let _one_at_a_time = agent.keystores.lock().await;
        for store in noted().into_keys() {
            if !run(&agent, &tool, &store, &["-delete"]).await {
                agent.lines.note(&format!("{store} still has the certificate: keytool failed"));
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
async fn run(agent: &Agent, tool: &str, store: &str, order: &[&str]) -> bool {
    let (Ok(program), Ok(owned)) = (fs::metadata(tool), fs::metadata(store)) else { return false };
    // Whoever has the store may have put anything in place of the tool.
    if ![0, owned.uid()].contains(&program.uid()) {
        return false;
    }
    let rest = ["-alias", ALIAS, "-keystore", store, "-storepass", PASSWORD];
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
