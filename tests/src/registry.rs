//! A real registry (`docker-registry` of the distribution) on loopback, and images made by hand for it.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{request, wait_for};

/// Of the user `me`, whose password is [`PASSWORD`].
const HTPASSWD: &str = "me:$2b$05$abcdefghijklmnopqrstuulZu.ILEXqeNBq7QTUS3kx8ZZIO3trhO\n";
pub const PASSWORD: &str = "hunter2-registry";

/// One registry; several may have the same storage.
pub struct Registry {
    child: Child,
    pub host: String,
    storage: PathBuf,
    /// Of the authority that its certificate is from, if it speaks TLS.
    pub authority: PathBuf,
}

impl Registry {
    /// Without TLS and logins. `None`: there is none on this host.
    pub fn plain(dir: &Path) -> Option<Self> {
        Self::start(dir, "")
    }

    /// With the storage of another, by TLS, and for the user `me` only.
    pub fn private(&self, dir: &Path) -> Option<Self> {
        fs::create_dir_all(dir).expect("a registry can be set up");
        let mut authority =
            rcgen::CertificateParams::new(Vec::new()).expect("a registry can be set up");
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().expect("a registry can be set up");
        let root = authority.self_signed(&key).expect("a registry can be set up");
        let issuer = rcgen::Issuer::new(authority, key);
        let own = rcgen::KeyPair::generate().expect("a registry can be set up");
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()])
            .expect("a registry can be set up");
        let certificate = params.signed_by(&own, &issuer).expect("a registry can be set up");
        fs::write(dir.join("ca.pem"), root.pem()).expect("a registry can be set up");
        fs::write(dir.join("cert.pem"), certificate.pem()).expect("a registry can be set up");
        fs::write(dir.join("key.pem"), own.serialize_pem()).expect("a registry can be set up");
        fs::write(dir.join("htpasswd"), HTPASSWD).expect("a registry can be set up");
        let shown = dir.display();
        let more = format!(
            "  tls:\n    certificate: {shown}/cert.pem\n    key: {shown}/key.pem\n\
             auth:\n  htpasswd:\n    realm: test\n    path: {shown}/htpasswd\n"
        );
        std::os::unix::fs::symlink(&self.storage, dir.join("storage"))
            .expect("a registry can be set up");
        let mut registry = Self::start(dir, &more)?;
        registry.host = registry.host.replace("127.0.0.1", "localhost");
        Some(registry)
    }

    fn start(dir: &Path, more: &str) -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        if !std::env::split_paths(&path).any(|dir| dir.join("docker-registry").is_file()) {
            torpor_testkit::missing("docker-registry is not installed");
            return None;
        }
        fs::create_dir_all(dir).expect("a registry can be set up");
        let storage = dir.join("storage");
        // Nobody else takes it in between, as a rule.
        let host = TcpListener::bind("127.0.0.1:0")
            .expect("a registry can be set up")
            .local_addr()
            .expect("a registry can be set up")
            .to_string();
        let config = format!(
            "version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: {}\n\
             http:\n  addr: {host}\n{more}",
            storage.display()
        );
        let file = dir.join("config.yml");
        fs::write(&file, config).expect("a registry can be set up");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.join("log")).expect("a registry can be set up"))
            .spawn()
            .expect("a registry can be set up");
        let registry = Self { child, host, storage, authority: dir.join("ca.pem") };
        wait_for("the registry listens", || std::net::TcpStream::connect(&registry.host).ok());
        Some(registry)
    }

    /// `HOST/REST`
    pub fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.host)
    }

    fn send_blob(&self, repository: &str, bytes: &[u8]) -> String {
        let path = format!("/v2/{repository}/blobs/uploads/");
        let begun = request(&self.host, "POST", &path, "", b"");
        assert_eq!(begun.status, 202, "{begun:?}");
        let place = begun.header("location").expect("a place for the upload");
        let place = place.split_once(&self.host).map_or(place.clone(), |(_, path)| path.to_owned());
        let digest = sha256(bytes);
        let put = format!("{place}&digest={digest}");
        let sent = request(&self.host, "PUT", &put, "", bytes);
        assert_eq!(sent.status, 201, "{sent:?}");
        digest
    }

    fn send_manifest(&self, repository: &str, tag: &str, kind: &str, manifest: &Value) -> String {
        let bytes = manifest.to_string().into_bytes();
        let path = format!("/v2/{repository}/manifests/{tag}");
        let head = format!("content-type: application/vnd.oci.image.{kind}.v1+json\r\n");
        let sent = request(&self.host, "PUT", &path, &head, &bytes);
        assert_eq!(sent.status, 201, "{sent:?}");
        sha256(&bytes)
    }

    /// An image of these layers (plain tars), the first gzip and the others zstd, in an index of two
    /// platforms. Gives the digests of manifest and index.
    pub fn publish(&self, repository: &str, tag: &str, layers: &[Vec<u8>]) -> (String, String) {
        let mut listed = Vec::new();
        for (number, tar) in layers.iter().enumerate() {
            let (stored, kind) =
                if number == 0 { (gzip(tar), "gzip") } else { (zstd(tar), "zstd") };
            let media_type = format!("application/vnd.oci.image.layer.v1.tar+{kind}");
            let digest = self.send_blob(repository, &stored);
            listed.push(json!({"mediaType": media_type, "digest": digest, "size": stored.len()}));
        }
        let diffs: Vec<_> = layers.iter().map(|tar| sha256(tar)).collect();
        // The other machine comes first: whoever takes the first entry takes the wrong one.
        let entries = ["s390x", architecture()].map(|machine| {
            let (digest, size) = self.send_image(repository, machine, &listed, &diffs);
            let platform = json!({"os": "linux", "architecture": machine});
            let kind = "application/vnd.oci.image.manifest.v1+json";
            json!({"mediaType": kind, "digest": digest, "size": size, "platform": platform})
        });
        let digest = entries[1]["digest"].as_str().unwrap_or_default().to_owned();
        let index = json!({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": entries,
        });
        let of_index = self.send_manifest(repository, tag, "index", &index);
        (digest, of_index)
    }

    /// The manifest of an image for this machine: its digest and size.
    fn send_image(
        &self,
        repository: &str,
        machine: &str,
        layers: &[Value],
        diffs: &[String],
    ) -> (String, usize) {
        let config = json!({
            "architecture": machine, "os": "linux",
            "config": {"Env": ["WHO=registry"], "WorkingDir": "/data", "Labels": {"made": "here"}},
            "rootfs": {"type": "layers", "diff_ids": diffs},
        });
        let config = config.to_string().into_bytes();
        let media_type = "application/vnd.oci.image.config.v1+json";
        let digest = self.send_blob(repository, &config);
        let config = json!({"mediaType": media_type, "digest": digest, "size": config.len()});
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest =
            json!({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers});
        let text = manifest.to_string();
        let digest =
            self.send_manifest(repository, &sha256(text.as_bytes()), "manifest", &manifest);
        (digest, text.len())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, bytes).expect("a registry can be set up");
    encoder.finish().expect("a registry can be set up")
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}
