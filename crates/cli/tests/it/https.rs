//! A daemon that is spoken to over TLS.

use std::net::TcpListener;
use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use torpor_daemon::Config;

use crate::torpor::Done;
use crate::world::{World, bare, finish};

/// A daemon with a certificate for localhost that nobody knows, and the address of its listener.
fn encrypted(dir: &Path) -> (World, String) {
    let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let (chain_file, key_file) = (dir.join("chain.pem"), dir.join("key.pem"));
    std::fs::write(&chain_file, certificate.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let mut config = Config { data_dir: dir.to_owned(), ..Config::default() };
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    config.tls.listen = Some(free);
    config.tls.certificate = Some(chain_file);
    config.tls.key = Some(key_file);
    (World::with(config), format!("https://localhost:{}", free.port()))
}

fn torpor(world: &World, server: &str, authority: Option<&Path>, args: &[&str]) -> Done {
    let mut command = bare(args.iter().copied());
    command.env("TORPOR_SERVER", server);
    if let Some(authority) = authority {
        command.env("TORPOR_CA_FILE", authority);
    }
    world.runtime().block_on(finish(command, b"typed\n"))
}

#[test]
fn requests_and_sockets_go_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let (world, server) = encrypted(dir.path());
    let chain = dir.path().join("chain.pem");
    let torpor = |args: &[&str]| torpor(&world, &server, Some(&chain), args);
    assert_eq!(torpor(&["create", "--name", "web"]).ok(), "web\n");
    assert_eq!(torpor(&["run", "web", "--", "echo", "hello"]).ok(), "hello\n");
    assert_eq!(torpor(&["exec", "-i", "web", "cat"]).ok(), "typed\n");
}

#[test]
fn a_certificate_that_nobody_knows_is_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let (world, server) = encrypted(dir.path());
    let (code, said) = torpor(&world, &server, None, &["ps"]).failed();
    assert_eq!(code, 1);
    assert!(said.contains("is not believed") && said.contains("TORPOR_CA_FILE"), "{said}");
    let (_, said) = torpor(&world, &server, Some(Path::new("/nowhere")), &["ps"]).failed();
    assert!(said.contains("/nowhere"), "{said}");
}
