//! NDJSON: a body whose every line is a JSON value; and server-sent events whose data is one.

use std::marker::PhantomData;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use crate::{Error, Result};

/// Longest line that is believed. An event of the daemon carries 128 KiB of output at most, which
/// base64 and JSON escapes make six times as long at worst.
const LINE_MAX: usize = 4 * 1024 * 1024;

/// Cuts bytes into lines.
#[derive(Debug, Default)]
struct LineBuffer {
    bytes: BytesMut,
    /// Up to here there is no line end.
    searched: usize,
}

/// A line longer than [`LINE_MAX`].
#[derive(Debug, PartialEq, Eq)]
struct LineTooLong;

impl LineBuffer {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line, without its end; None: more bytes are needed.
    fn line(&mut self) -> Result<Option<Bytes>, LineTooLong> {
        let end = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        match end {
            Some(end) if self.searched + end > LINE_MAX => Err(LineTooLong),
            Some(end) => {
                let mut line = self.bytes.split_to(self.searched + end + 1);
                line.truncate(line.len() - 1);
                self.searched = 0;
                Ok(Some(line.freeze()))
            }
            None if self.bytes.len() > LINE_MAX => Err(LineTooLong),
            None => {
                self.searched = self.bytes.len();
                Ok(None)
            }
        }
    }

    /// What came after the last line end.
    fn rest(&mut self) -> Bytes {
        self.searched = 0;
        self.bytes.split().freeze()
    }
}

/// The values of a body, one after the other.
#[derive(Debug)]
pub struct Lines<T> {
    body: Incoming,
    buffer: LineBuffer,
    ended: bool,
    form: Form,
    value: PhantomData<fn() -> T>,
}

/// How values stand in lines.
#[derive(Debug, Clone, Copy)]
enum Form {
    Ndjson,
    /// Behind `data: `; other lines say things around it.
    Events,
}

impl Form {
    /// The value in a line, if there is one.
    fn value(self, line: &[u8]) -> Option<&[u8]> {
        let value = match self {
            Self::Ndjson => line,
            Self::Events => line.strip_prefix(b"data: ")?,
        };
        (!value.is_empty()).then_some(value)
    }
}

impl<T: DeserializeOwned> Lines<T> {
    pub(crate) fn new(body: Incoming) -> Self {
        Self::of(body, Form::Ndjson)
    }

    pub(crate) fn events(body: Incoming) -> Self {
        Self::of(body, Form::Events)
    }

    fn of(body: Incoming, form: Form) -> Self {
        Self { body, buffer: LineBuffer::default(), ended: false, form, value: PhantomData }
    }

    /// None: the body is over. Cancelling loses nothing.
    pub async fn next(&mut self) -> Result<Option<T>> {
        loop {
            if let Some(line) = self.buffer.line().map_err(|LineTooLong| too_long())? {
                if let Some(value) = self.form.value(&line) {
                    return decode(value).map(Some);
                }
            } else if self.ended {
                let rest = self.buffer.rest();
                return self.form.value(&rest).map(decode).transpose();
            } else {
                self.fill().await?;
            }
        }
    }

    async fn fill(&mut self) -> Result<()> {
        match self.body.frame().await {
            None => self.ended = true,
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.buffer.push(data);
                }
            }
            Some(Err(error)) => {
                return Err(Error::garbled("the daemon broke off its answer", error));
            }
        }
        Ok(())
    }
}

fn decode<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    serde_json::from_slice(line)
        .map_err(|error| Error::garbled("can't read a line of the daemon's answer", error))
}

fn too_long() -> Error {
    Error::garbled("can't read the daemon's answer", format!("a line of over {LINE_MAX} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lines(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut buffer = LineBuffer::default();
        let mut lines = Vec::new();
        for chunk in chunks {
            buffer.push(chunk);
            while let Some(line) = buffer.line().unwrap() {
                lines.push(line.to_vec());
            }
        }
        lines.push(buffer.rest().to_vec());
        lines
    }

    #[test]
    fn a_line_may_come_in_pieces() {
        assert_eq!(lines(&[b"{\"a\"", b":1}\n{", b"}\n", b""]), [&b"{\"a\":1}"[..], b"{}", b""]);
    }

    #[test]
    fn of_server_sent_events_the_data_is_read() {
        let value = |line: &'static str| Form::Events.value(line.as_bytes());
        assert_eq!(value("data: {}"), Some(&b"{}"[..]));
        assert_eq!([value("id: 7"), value(": ping"), value(""), value("data: ")], [None; 4]);
        assert_eq!(Form::Ndjson.value(b"{}"), Some(&b"{}"[..]));
    }

    #[test]
    fn an_endless_line_is_an_error_and_not_all_memory() {
        let mut buffer = LineBuffer::default();
        let chunk = vec![b'x'; 1024 * 1024];
        let refused = (0..6).any(|_| {
            buffer.push(&chunk);
            buffer.line() == Err(LineTooLong)
        });
        assert!(refused);
    }

    proptest! {
        #[test]
        fn the_cuts_between_chunks_do_not_matter(
            text in proptest::collection::vec(prop_oneof![Just(b'\n'), any::<u8>()], 0..200),
            cut in 1usize..20,
        ) {
            let whole = lines(&[&text]);
            let pieces: Vec<&[u8]> = text.chunks(cut).collect();
            prop_assert_eq!(whole, lines(&pieces));
        }
    }
}
