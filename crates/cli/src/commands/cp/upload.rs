//! From here to a sandbox.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use http::Method;
use torpor_client::body::{self, Body};
use torpor_client::{Client, Route};
use torpor_protocol::api::FileEntry;

use super::place::{join, means_content};
use super::{There, look};
use crate::archive::{self, Choice, Owners, Packed};
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;
use crate::units;

pub(super) async fn from_path(client: &Client, from: &Path, of: &Route, path: &str) -> Result<()> {
    let found = fs::metadata(from).map_err(|error| cannot_read(from, error))?;
    let there = look(client, of, path).await?;
    if found.is_dir() {
        let to = directory_target(from, path, &there)?;
        directory(client, from, of, &to).await
    } else {
        let to = file_target(from, path, &there)?;
        file(client, from, &found, of, &to).await
    }
}

/// A tar if the path is a directory that exists, else the bytes of a file.
pub(super) async fn from_stdin(client: &Client, of: &Route, path: &str) -> Result<()> {
    let progress = Progress::bytes(None, "standard input");
    let body = body::reader(tokio::io::stdin(), progress.counter());
    match look(client, of, path).await? {
        There::Directory => send_archive(client, of, path, body).await,
        There::Nothing if path.ends_with('/') => Err(no_directory(path)),
        There::Nothing | There::File(_) => {
            let route = of.clone().then("/files/content").query("path", path);
            Ok(client.upload(Method::PUT, &route, body).await.map(|_: FileEntry| ())?)
        }
    }
}

async fn file(client: &Client, from: &Path, found: &Metadata, of: &Route, to: &str) -> Result<()> {
    let file = tokio::fs::File::open(from).await.map_err(|error| cannot_read(from, error))?;
    let total = found.is_file().then_some(found.len());
    let progress = Progress::bytes(total, from.display().to_string());
    let mode = units::show_mode(found.mode() & 0o777);
    let route = of.clone().then("/files/content").query("path", to).query("mode", &mode);
    let body = body::reader(file, progress.counter());
    Ok(client.upload(Method::PUT, &route, body).await.map(|_: FileEntry| ())?)
}

async fn directory(client: &Client, from: &Path, of: &Route, to: &str) -> Result<()> {
    let progress = Progress::bytes(None, from.display().to_string());
    let send = async |body| send_archive(client, of, to, body).await;
    let (packed, ()) = packed(from.to_owned(), Owners::Root, progress.counter(), send).await?;
    drop(progress);
    note_left_out(&packed);
    Ok(())
}

async fn send_archive(client: &Client, of: &Route, to: &str, body: Body) -> Result<()> {
    let route = of.clone().then("/files/archive").query("path", to);
    Ok(client.send(Method::PUT, &route, body).await.map(drop)?)
}

/// Packs what is in a directory on a thread while `send` takes its tar. What went wrong here is
/// told before what the daemon thought of half a tar.
pub(in crate::commands) async fn packed<T>(
    directory: PathBuf,
    owners: Owners,
    count: impl Fn(usize) + Send + 'static,
    send: impl AsyncFnOnce(Body) -> Result<T>,
) -> Result<(Packed, T)> {
    packed_after(Vec::new(), directory, (owners, Choice::default()), count, send).await
}

/// The same of some of it, with other bytes before the archive.
pub(in crate::commands) async fn packed_after<T>(
    head: Vec<u8>,
    directory: PathBuf,
    (owners, choice): (Owners, Choice),
    count: impl Fn(usize) + Send + 'static,
    send: impl AsyncFnOnce(Body) -> Result<T>,
) -> Result<(Packed, T)> {
    let (mut writer, body) = body::written(count);
    let shown = directory.display().to_string();
    let work = tokio::task::spawn_blocking(move || {
        let packed = io::Write::write_all(&mut writer, &head)
            .and_then(|()| archive::pack(&directory, Path::new(""), owners, &choice, &mut writer));
        let (packed, result) = match packed {
            Ok(packed) => (packed, Ok(())),
            Err(error) => (Packed::default(), Err(error)),
        };
        writer.finish(result).map(|()| packed)
    });
    let sent = send(body).await;
    let packed = work.await.map_err(|error| Error::internal("packing the files failed", error))?;
    match (packed, sent) {
        (Ok(packed), sent) => Ok((packed, sent?)),
        // The daemon hung up; it said why.
        (Err(error), Err(refused)) if error.kind() == io::ErrorKind::ConnectionAborted => {
            Err(refused)
        }
        (Err(error), _) => Err(Error::local(format!("can't pack {shown}"), error)),
    }
}

pub(in crate::commands) fn note_left_out(packed: &Packed) {
    if packed.left_out > 0 {
        let count = packed.left_out;
        output::note(&format!("torpor: {count} sockets, pipes or devices were left out"));
    }
}

fn cannot_read(path: &Path, error: io::Error) -> Error {
    Error::local(format!("can't read {}", path.display()), error)
}

fn no_directory(path: &str) -> Error {
    Error::failed(format!("there is no directory {path} in the sandbox"))
}

/// The last name of a path of ours, also for `.` and `..`.
fn own_name(from: &Path) -> Result<String> {
    let named = match from.file_name() {
        Some(_) => from.to_owned(),
        None => fs::canonicalize(from).map_err(|error| cannot_read(from, error))?,
    };
    let name = named.file_name().and_then(|name| name.to_str());
    name.map(str::to_owned)
        .ok_or_else(|| Error::failed(format!("the name of {} is no text", from.display())))
}

fn file_target(from: &Path, path: &str, there: &There) -> Result<String> {
    match there {
        There::Directory => Ok(join(path, &own_name(from)?)),
        There::Nothing if path.ends_with('/') => Err(no_directory(path)),
        There::Nothing | There::File(_) => Ok(path.to_owned()),
    }
}

fn directory_target(from: &Path, path: &str, there: &There) -> Result<String> {
    match there {
        There::Directory if from.to_str().is_some_and(means_content) => Ok(path.to_owned()),
        There::Directory => Ok(join(path, &own_name(from)?)),
        There::Nothing => Ok(path.to_owned()),
        There::File(_) => Err(Error::failed(format!(
            "can't copy a directory onto the file {path} in the sandbox"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_file() -> There {
        There::File(FileEntry {
            path: "/x".into(),
            kind: "file".into(),
            size: 0,
            mode: 0o644,
            uid: 0,
            gid: 0,
            modified_at_ms: 0,
            target: None,
        })
    }

    #[test]
    fn a_file_goes_into_a_directory_or_becomes_the_path() {
        let from = Path::new("src/a.txt");
        let target = |path, there| file_target(from, path, &there);
        assert_eq!(target("/tmp", There::Directory).unwrap(), "/tmp/a.txt");
        assert_eq!(target("/tmp/", There::Directory).unwrap(), "/tmp/a.txt");
        assert_eq!(target("/tmp/b", There::Nothing).unwrap(), "/tmp/b");
        assert_eq!(target("/tmp/b", a_file()).unwrap(), "/tmp/b");
        assert!(target("/nowhere/", There::Nothing).is_err());
    }

    #[test]
    fn a_directory_goes_into_a_directory_or_becomes_the_path() {
        let target = |from: &str, there| directory_target(Path::new(from), "/app", &there);
        assert_eq!(target("a/src", There::Directory).unwrap(), "/app/src");
        assert_eq!(target("a/src/", There::Directory).unwrap(), "/app/src");
        assert_eq!(target("a/src/.", There::Directory).unwrap(), "/app");
        assert_eq!(target("a/src", There::Nothing).unwrap(), "/app");
        assert!(target("a/src", a_file()).is_err());
    }
}
