//! Client of a sandbox's control socket: JSON calls over a unix stream, with file descriptors
//! beside the first byte of a call.
//!
//! The other end is the sentry, which runs the guest: what it says is bounded ([`REPLY_MAX`]) and
//! every call has a deadline.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::timeout;
use torpor_protocol::Excerpt;

/// Longest reply: the stacks of some ten thousand threads. Most have a hundred bytes.
const REPLY_MAX: usize = 64 * 1024 * 1024;
/// Descriptors beside one call.
const FDS_MAX: usize = 4;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum UrpcError {
    #[error("the sandbox's control socket {} can't be reached", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{method} failed: {message}")]
    Refused { method: &'static str, message: Excerpt },
    #[error("{method} did not answer within {} s", wait.as_secs())]
    Deadline { method: &'static str, wait: Duration },
    #[error("the connection broke during {method}")]
    Broken {
        method: &'static str,
        #[source]
        source: io::Error,
    },
}

/// A connection to one sandbox. One call at a time; after an error it is not used again.
#[derive(Debug)]
pub(super) struct Urpc {
    stream: UnixStream,
}

#[derive(Serialize)]
struct Call<'a, A> {
    method: &'a str,
    arg: A,
}

#[derive(Deserialize)]
struct Answer {
    success: bool,
    #[serde(default)]
    err: String,
    #[serde(default)]
    result: Value,
}

impl Urpc {
    pub(super) async fn connect(path: &Path) -> Result<Self, UrpcError> {
        let broken = |source| UrpcError::Connect { path: path.to_owned(), source };
        Ok(Self { stream: UnixStream::connect(path).await.map_err(broken)? })
    }

    /// Calls `method` and waits for its result.
    pub(super) async fn call<A: Serialize>(
        &mut self,
        method: &'static str,
        arg: A,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<Value, UrpcError> {
        self.ask(method, arg, fds, wait, false).await
    }

    /// The same for a call that sets the guest going. The thread that serves a call goes on to wait
    /// for the next one, with what it has set going in its queue, and nobody looks there for 10 to
    /// 20 ms. Told that there will be no next one, it turns to its queue at once.
    pub(super) async fn call_last<A: Serialize>(
        mut self,
        method: &'static str,
        arg: A,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
    ) -> Result<Value, UrpcError> {
        self.ask(method, arg, fds, wait, true).await
    }

    async fn ask<A: Serialize>(
        &mut self,
        method: &'static str,
        arg: A,
        fds: &[BorrowedFd<'_>],
        wait: Duration,
        last: bool,
    ) -> Result<Value, UrpcError> {
        let call = serde_json::to_vec(&Call { method, arg }).expect("arguments have text keys");
        let answer = timeout(wait, self.exchange(&call, fds, last))
            .await
            .map_err(|_| UrpcError::Deadline { method, wait })?
            .map_err(|source| UrpcError::Broken { method, source })?;
        if !answer.success {
            return Err(UrpcError::Refused { method, message: shortened(&answer.err) });
        }
        Ok(answer.result)
    }

    async fn exchange(
        &mut self,
        call: &[u8],
        fds: &[BorrowedFd<'_>],
        last: bool,
    ) -> io::Result<Answer> {
        let sent = if fds.is_empty() { 0 } else { self.send_with(call, fds).await? };
        self.stream.write_all(&call[sent..]).await?;
        if last {
            self.stream.shutdown().await?;
        }
        let mut reply = Vec::with_capacity(512);
        while reply.len() < REPLY_MAX {
            if self.stream.read_buf(&mut reply).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // There is no framing: the reply is whole when it parses.
            match serde_json::from_slice(&reply) {
                Ok(answer) => return Ok(answer),
                Err(error) if error.is_eof() => {}
                Err(error) => {
                    let words = Excerpt::from(error.to_string());
                    return Err(io::Error::new(io::ErrorKind::InvalidData, words.to_string()));
                }
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the reply has no end"))
    }

    async fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let iov = [IoSlice::new(bytes)];
            Ok(sendmsg(self.stream.as_fd(), &iov, &mut control, flags)?)
        };
        self.stream.async_io(Interest::WRITABLE, send).await
    }
}

/// The first line; the rest is for who wrote the sandbox.
fn shortened(words: &str) -> Excerpt {
    words.lines().next().unwrap_or_default().trim_end_matches(':').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(5);

    /// A sandbox that answers with `replies`, cut where they are cut here.
    async fn sandbox(replies: &[&'static str]) -> Urpc {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let replies = replies.to_vec();
        tokio::spawn(async move {
            let mut call = vec![0; 4096];
            let _ = theirs.read(&mut call).await;
            for reply in replies {
                theirs.write_all(reply.as_bytes()).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        Urpc { stream: ours }
    }

    #[tokio::test]
    async fn a_reply_in_pieces_is_one_reply() {
        let mut urpc =
            sandbox(&["{\"success\":tr", "ue,\"err\":\"\",\"result\":{\"a\"", ":1}}"]).await;
        let result = urpc.call("a.B", "x", &[], WAIT).await.unwrap();
        assert_eq!(result["a"], 1);
    }

    #[tokio::test]
    async fn a_refusal_carries_the_sandboxs_words() {
        let reply = "{\"success\":false,\"err\":\"no such container:\\ngoroutine 1\"}";
        let mut urpc = sandbox(&[reply]).await;
        let error = urpc.call("a.B", "x", &[], WAIT).await.unwrap_err();
        assert_eq!(error.to_string(), "a.B failed: no such container");
    }

    #[tokio::test]
    async fn of_what_a_broken_sandbox_says_one_short_printable_line_is_passed_on() {
        let flood: &'static str = String::leak("\\u001b[2J".repeat(10_000));
        let refused = String::leak(format!("{{\"success\":false,\"err\":\"{flood}\"}}"));
        let absurd = String::leak(format!("{{\"success\":\"{flood}\"}}"));
        for reply in [&*refused, &*absurd] {
            let error = sandbox(&[reply]).await.call("a.B", "x", &[], WAIT).await.unwrap_err();
            let text = torpor_lifecycle::chain(&error);
            assert!(text.len() < 1000, "{} bytes", text.len());
            assert!(!text.chars().any(char::is_control), "{text:?}");
        }
    }

    #[tokio::test]
    async fn a_sandbox_that_hangs_up_or_talks_nonsense_is_an_error() {
        for replies in [&["{\"success\":"][..], &["hello"][..], &[][..]] {
            let error = sandbox(replies).await.call("a.B", (), &[], WAIT).await.unwrap_err();
            assert!(matches!(error, UrpcError::Broken { .. }), "{error}");
        }
    }
}
