//! From a sandbox to here. What comes is not trusted: see `archive::unpack`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use http::{Method, header};
use hyper::body::Incoming;
use torpor_client::body::ChunkReader;
use torpor_client::{Client, Route, body};

use super::place::{base_name, means_content};
use super::{There, look};
use crate::archive::{self, Directory};
use crate::commands::cat::print_body;
use crate::error::{EXIT_INTERRUPTED, Error, Result};
use crate::output::{self, plain};
use crate::progress::Progress;

pub(super) async fn to_stdout(client: &Client, of: &Route, path: &str) -> Result<()> {
    let route = match look(client, of, path).await? {
        There::Directory => archive_route(of, path),
        There::File(_) | There::Nothing => file_route(of, path),
    };
    let progress = Progress::bytes(None, plain(path));
    print_body(client, &route, progress.counter()).await
}

pub(super) async fn to_path(client: &Client, of: &Route, path: &str, to: &Path) -> Result<()> {
    match look(client, of, path).await? {
        There::Directory => directory(client, of, path, to).await,
        There::File(found) => file(client, of, path, found.mode, to).await,
        // The daemon says in its own words that there is none.
        There::Nothing => file(client, of, path, 0o644, to).await,
    }
}

fn file_route(of: &Route, path: &str) -> Route {
    of.clone().then("/files/content").query("path", path)
}

fn archive_route(of: &Route, path: &str) -> Route {
    of.clone().then("/files/archive").query("path", path)
}

async fn file(client: &Client, of: &Route, path: &str, mode: u32, to: &Path) -> Result<()> {
    let to = file_target(path, to)?;
    let response = client.send(Method::GET, &file_route(of, path), body::empty()).await?;
    let length = response.headers().get(header::CONTENT_LENGTH);
    let size = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    // A link's own mode means nothing; the file's mode comes with the file.
    let sent = response.headers().get("x-torpor-mode").and_then(|mode| mode.to_str().ok());
    let mode = sent.and_then(|mode| u32::from_str_radix(mode, 8).ok()).unwrap_or(mode);
    let progress = Progress::bytes(size, plain(path));
    let shown = to.display().to_string();
    let work = move |mut content: ChunkReader| archive::put_file(&to, mode, size, &mut content);
    receive(response.into_body(), &progress, work).await?.map_err(|e| cannot_write(&shown, e))
}

async fn directory(client: &Client, of: &Route, path: &str, to: &Path) -> Result<()> {
    let to = directory_target(path, to)?;
    let shown = to.display().to_string();
    let response = client.send(Method::GET, &archive_route(of, path), body::empty()).await?;
    match fs::create_dir(&to) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(cannot_write(&shown, error));
        }
        Ok(()) | Err(_) => (),
    }
    let progress = Progress::bytes(None, plain(path));
    let work = move |mut content: ChunkReader| {
        let unpacked = archive::unpack(&mut content, &Directory::open(&to)?)?;
        // The end of the tar is not the end of the answer; only that one says that all came.
        io::copy(&mut content, &mut io::sink())?;
        Ok(unpacked)
    };
    let unpacked = receive(response.into_body(), &progress, work).await?;
    drop(progress);
    let unpacked = unpacked.map_err(|error| cannot_write(&shown, error))?;
    if unpacked.left_out > 0 {
        output::note(&format!("torpor: {} devices or pipes were left out", unpacked.left_out));
    }
    Ok(())
}

/// Streams a body to blocking work. ctrl-c lets the work end first, so that it can tidy up.
pub(in crate::commands) async fn receive<T: Send + 'static>(
    body: Incoming,
    progress: &Progress,
    work: impl FnOnce(ChunkReader) -> io::Result<T> + Send + 'static,
) -> Result<io::Result<T>> {
    let (reader, pump) = body::read(body, progress.counter());
    let work = tokio::task::spawn_blocking(move || work(reader));
    let interrupted = tokio::select! {
        () = pump => false,
        _ = tokio::signal::ctrl_c() => true,
    };
    let done = work.await;
    if interrupted {
        return Err(Error::Exit(EXIT_INTERRUPTED));
    }
    done.map_err(|error| Error::internal("writing the files failed", error))
}

fn cannot_write(path: &str, error: io::Error) -> Error {
    Error::local(format!("can't write to {path}"), error)
}

/// Where a file goes.
fn file_target(path: &str, to: &Path) -> Result<PathBuf> {
    if to.is_dir() {
        let name = base_name(path).ok_or_else(|| Error::usage("the file has no name"))?;
        return Ok(to.join(name));
    }
    if ends_with_slash(to) {
        return Err(Error::failed(format!("there is no directory {}", to.display())));
    }
    Ok(to.to_owned())
}

/// Where what is in a directory goes.
fn directory_target(path: &str, to: &Path) -> Result<PathBuf> {
    if to.is_dir() {
        return Ok(match base_name(path) {
            Some(name) if !means_content(path) => to.join(name),
            Some(_) | None => to.to_owned(),
        });
    }
    if fs::symlink_metadata(to).is_ok() {
        let message = format!("can't copy a directory onto the file {}", to.display());
        return Err(Error::failed(message));
    }
    Ok(to.to_owned())
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_goes_into_a_directory_or_becomes_the_path() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        assert_eq!(file_target("/etc/hosts", dir).unwrap(), dir.join("hosts"));
        assert_eq!(file_target("/etc/hosts", &dir.join("new")).unwrap(), dir.join("new"));
        assert!(file_target("/etc/hosts", &dir.join("missing/")).is_err());
    }

    #[test]
    fn a_directory_goes_into_a_directory_or_becomes_the_path() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        fs::write(dir.join("file"), "").unwrap();
        assert_eq!(directory_target("/var/log", dir).unwrap(), dir.join("log"));
        assert_eq!(directory_target("/var/log/.", dir).unwrap(), dir);
        assert_eq!(directory_target("/", dir).unwrap(), dir);
        assert_eq!(directory_target("/var/log", &dir.join("new")).unwrap(), dir.join("new"));
        assert!(directory_target("/var/log", &dir.join("file")).is_err());
    }
}
