//! Let's Encrypt's test server on free ports, with a name server that leads every name to 127.0.0.1.
//! Both end with their value.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use hickory_proto::op::{Message, OpCode};
use hickory_proto::rr::rdata::{A, TXT};
use hickory_proto::rr::{RData, Record, RecordType};
use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tempfile::TempDir;
use tokio::net::UdpSocket;
use tokio_util::task::AbortOnDropHandle;

use crate::client::PATIENCE;
use crate::secure;

pub(crate) struct Pebble {
    child: Child,
    pub(crate) directory: String,
    management: SocketAddr,
    /// Where it looks for answers.
    pub(crate) http: SocketAddr,
    pub(crate) tls: SocketAddr,
    /// The name server.
    pub(crate) names: SocketAddr,
    dir: TempDir,
    _names: AbortOnDropHandle<()>,
}

impl Drop for Pebble {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Pebble {
    /// None: it is not installed, which is said.
    pub(crate) async fn start(validity: Duration) -> Option<Self> {
        if !installed() {
            torpor_testkit::missing("pebble is not installed");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let [listen, management, http, tls] = [(); 4].map(|()| free());
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        let place = |name: &str| dir.path().join(name);
        std::fs::write(place("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(place("key.pem"), key.serialize_pem()).unwrap();
        let config = json!({"pebble": {
            "listenAddress": listen, "managementListenAddress": management,
            "certificate": place("cert.pem"), "privateKey": place("key.pem"),
            "httpPort": http.port(), "tlsPort": tls.port(), "ocspResponderURL": "",
            "certificateValidityPeriod": validity.as_secs(),
        }});
        std::fs::write(place("config.json"), config.to_string()).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let server = socket.local_addr().unwrap();
        let records = place("records");
        let names = tokio::spawn(async move { answer(socket, &records).await });
        let log = std::fs::File::create(place("log")).unwrap();
        let child = Command::new("pebble")
            .arg("-config")
            .arg(place("config.json"))
            .args(["-dnsserver", &server.to_string()])
            .envs([("PEBBLE_VA_NOSLEEP", "1"), ("PEBBLE_WFE_NONCEREJECT", "0")])
            .env("PEBBLE_AUTHZREUSE", "0")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let directory = format!("https://{listen}/dir");
        let _names = AbortOnDropHandle::new(names);
        let pebble = Self { child, directory, management, http, tls, names: server, dir, _names };
        pebble.wait(&[listen, management]).await;
        Some(pebble)
    }

    async fn wait(&self, addresses: &[SocketAddr]) {
        for address in addresses {
            let listens = async {
                while tokio::net::TcpStream::connect(address).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            let listens = tokio::time::timeout(PATIENCE, listens).await;
            assert!(listens.is_ok(), "pebble does not listen:\n{}", self.log());
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// What its own address is believed with (PEM).
    pub(crate) fn roots(&self) -> PathBuf {
        self.dir.path().join("cert.pem")
    }

    /// What the certificates that it gives are believed with.
    pub(crate) async fn authority(&self) -> RootCertStore {
        let own = CertificateDer::from_pem_file(self.roots()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(own).unwrap();
        let answer = secure::get(self.management, "127.0.0.1", &roots, "/roots/0").await.unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(&answer.body).unwrap()).unwrap();
        roots
    }

    /// A program that sets records of its name server.
    pub(crate) fn hook(&self) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.dir.path().join("hook");
        let records = self.dir.path().join("records");
        let script = format!("#!/bin/sh\necho \"$1 $2 $3\" >> {}\n", records.display());
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Sets a TXT record.
    pub(crate) fn set(&self, name: &str, value: &str) {
        std::fs::write(self.dir.path().join("records"), format!("present {name} {value}\n"))
            .unwrap();
    }

    /// What the program was called with.
    pub(crate) fn hook_calls(&self) -> Vec<String> {
        let said = std::fs::read_to_string(self.dir.path().join("records")).unwrap_or_default();
        said.lines().map(str::to_owned).collect()
    }
}

fn installed() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join("pebble").is_file())
}

/// An address that nobody uses, below those that the kernel gives to outgoing connections.
pub(crate) fn free() -> SocketAddr {
    loop {
        let mut bytes = [0; 2];
        getrandom::fill(&mut bytes).unwrap();
        let port = 20_000 + u16::from_le_bytes(bytes) % 12_000;
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().unwrap();
        }
    }
}

/// Every name is at 127.0.0.1; its texts are those that the hook has set.
async fn answer(socket: UdpSocket, records: &Path) {
    let mut buffer = [0; 2000];
    loop {
        let (read, peer) = socket.recv_from(&mut buffer).await.unwrap();
        let Ok(question) = Message::from_vec(&buffer[..read]) else { continue };
        let mut answer = Message::response(question.metadata.id, OpCode::Query);
        answer.queries = question.queries.clone();
        let Some(query) = question.queries.first() else { continue };
        let name = query.name().clone();
        if query.query_type() == RecordType::A {
            let data = RData::A(A::new(127, 0, 0, 1));
            answer.add_answer(Record::from_rdata(name.clone(), 0, data));
        }
        if query.query_type() == RecordType::TXT {
            let asked = name.to_ascii().trim_end_matches('.').to_owned();
            let set = std::fs::read_to_string(records).unwrap_or_default();
            for value in set.lines().filter_map(|line| line.strip_prefix("present ")) {
                let Some((owner, value)) = value.split_once(' ') else { continue };
                if owner == asked {
                    let data = RData::TXT(TXT::new(vec![value.to_owned()]));
                    answer.add_answer(Record::from_rdata(name.clone(), 0, data));
                }
            }
        }
        let _ = socket.send_to(&answer.to_vec().unwrap(), peer).await;
    }
}
