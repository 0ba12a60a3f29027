//! The thread that writes the audit log: the only one that changes its files.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::json;
use tokio::sync::{mpsc, oneshot};

use super::{FILES, LINE_MAX, Order, Shared};

/// Orders that become one write.
const BATCH: usize = 256;

pub(super) struct Writer {
    /// The one that grows, and those before it.
    paths: [PathBuf; FILES],
    file_max: u64,
    file: File,
    /// Bytes of the file.
    len: u64,
    shared: Arc<Shared>,
    /// The last write failed, and the log was told.
    failing: bool,
}

impl Writer {
    pub(super) fn open(
        paths: [PathBuf; FILES],
        file_max: u64,
        shared: Arc<Shared>,
    ) -> io::Result<Self> {
        let mut file = open_to_write(&paths[0])?;
        let mut len = file.metadata()?.len();
        let mut end = [b'\n'];
        if len > 0 {
            file.read_exact_at(&mut end, len - 1)?;
        }
        // A line that a crash has torn is not continued.
        if end != [b'\n'] {
            file.write_all(b"\n")?;
            len += 1;
        }
        Ok(Self { paths, file_max, file, len, shared, failing: false })
    }

    /// Writes until nobody notes anything any more.
    pub(super) fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut batch = Vec::with_capacity(BATCH);
        while orders.blocking_recv_many(&mut batch, BATCH) > 0 {
            self.obey(batch.drain(..));
        }
    }

    fn obey(&mut self, orders: impl Iterator<Item = Order>) {
        let mut lines = Lines::default();
        let mut waiting: Vec<oneshot::Sender<()>> = Vec::new();
        for order in orders {
            match order {
                Order::Write(event) => match serde_json::to_vec(&*event) {
                    Ok(line) if line.len() < LINE_MAX => lines.push(&line, event.at_ms),
                    Ok(_) | Err(_) => lines.lost += 1,
                },
                Order::Tell(tell) => waiting.push(tell),
            }
        }
        lines.lost += self.shared.lost.swap(0, Ordering::Relaxed);
        if lines.lost > 0 {
            let line = json!({"at_ms": lines.at_ms, "lost": lines.lost}).to_string();
            lines.bytes.extend_from_slice(line.as_bytes());
            lines.bytes.push(b'\n');
        }
        match self.append(&lines.bytes) {
            Ok(()) => self.failing = false,
            Err(error) => {
                self.shared.lost.fetch_add(lines.count + lines.lost, Ordering::Relaxed);
                if !self.failing {
                    tracing::error!(%error, "the audit log can't be written");
                }
                self.failing = true;
            }
        }
        for tell in waiting {
            // Whoever asked may be gone.
            let _ = tell.send(());
        }
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if self.len > 0 && self.len + bytes.len() as u64 > self.file_max {
            self.turn_over()?;
        }
        if let Err(error) = self.file.write_all(bytes) {
            // Half of it is worse than none; if that fails too, a reader skips the torn line.
            let _ = self.file.set_len(self.len);
            return Err(error);
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Every file becomes the one before it, and the oldest is gone.
    fn turn_over(&mut self) -> io::Result<()> {
        let _turn = self.shared.turn.lock();
        for (from, to) in self.paths.iter().zip(&self.paths[1..]).rev() {
            match std::fs::rename(from, to) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        self.file = open_to_write(&self.paths[0])?;
        self.len = 0;
        Ok(())
    }
}

/// What goes into the file in one write.
#[derive(Default)]
struct Lines {
    bytes: Vec<u8>,
    count: u64,
    lost: u64,
    /// Of the last one.
    at_ms: u64,
}

impl Lines {
    fn push(&mut self, line: &[u8], at_ms: u64) {
        self.bytes.extend_from_slice(line);
        self.bytes.push(b'\n');
        self.count += 1;
        self.at_ms = at_ms;
    }
}

/// Nobody else on the host may read what sandboxes do.
fn open_to_write(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)
}
