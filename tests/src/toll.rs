//! A proxy between a daemon and a server that counts what comes back, and lets through so much.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Passed on at a time.
const BUFFER: usize = 16 * 1024;
/// How often a connection that must wait looks again.
const LOOK: Duration = Duration::from_millis(5);

/// A proxy. Its connections end with the other side's.
pub struct Toll {
    pub host: String,
    passed: Arc<AtomicU64>,
    allowed: Arc<AtomicU64>,
}

impl Toll {
    /// In front of a server, with so many bytes that may come back.
    pub fn before(server: &str, allowed: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let host = listener.local_addr().expect("an address").to_string();
        let toll = Self { host, passed: Arc::default(), allowed: Arc::new(allowed.into()) };
        let (passed, allowed) = (Arc::clone(&toll.passed), Arc::clone(&toll.allowed));
        let server = server.to_owned();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&server) else { continue };
                let pair = || Some((client.try_clone().ok()?, server.try_clone().ok()?));
                let Some((from_client, to_server)) = pair() else { continue };
                let (passed, allowed) = (Arc::clone(&passed), Arc::clone(&allowed));
                std::thread::spawn(move || pass(from_client, to_server, |_| ()));
                std::thread::spawn(move || {
                    pass(server, client, |bytes| {
                        passed.fetch_add(bytes, Ordering::SeqCst);
                        while passed.load(Ordering::SeqCst) > allowed.load(Ordering::SeqCst) {
                            std::thread::sleep(LOOK);
                        }
                    });
                });
            }
        });
        toll
    }

    /// What came back so far.
    pub fn passed(&self) -> u64 {
        self.passed.load(Ordering::SeqCst)
    }

    /// Everything may come back from now on.
    pub fn open(&self) {
        self.allowed.store(u64::MAX, Ordering::SeqCst);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, pay: impl Fn(u64)) {
    let mut buffer = vec![0; BUFFER];
    while let Ok(count) = from.read(&mut buffer) {
        if count == 0 {
            break;
        }
        pay(count as u64);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
