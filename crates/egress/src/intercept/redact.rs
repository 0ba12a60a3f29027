//! What was put into requests does not come back with answers.
//!
//! A service that repeats what it was sent, at once or later, would give a secret to the sandbox. So in every
//! answer of a host the values of all secrets that this sandbox could have sent there are replaced by
//! `[secret NAME]`, in headers, in trailers and in the body while it streams. In bodies what stands in place
//! of a value is as long as it (the rest is stars): answers and messages say how long they are.
//!
//! Limits: found are the forms that [`forms`](super::forms) has. A service that encodes a value in another way
//! or gives it out in pieces (its own parts of a text, messages of a WebSocket that are split) gives it away:
//! bind secrets to hosts that don't.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http::header::HeaderValue;
use hyper::body::{Body as HttpBody, Frame, Incoming};
use torpor_protocol::SecretName;

use super::body::BoxError;
use super::decode::{Coding, Decoder};
use super::forms;

/// Shortest value that is looked for. Shorter ones hide nothing, and would tear answers apart.
const VALUE_MIN: usize = 4;

/// What must not come back. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Needles(Arc<Sorted>);

#[derive(Default)]
struct Sorted {
    /// The secrets that these are of.
    secrets: Vec<(SecretName, String)>,
    /// By their first byte, and of those the longest first: one may begin another. Empty: there is none.
    by_first: Vec<Vec<Needle>>,
}

struct Needle {
    value: Vec<u8>,
    instead: Vec<u8>,
}

/// Shows nothing of the values.
impl fmt::Debug for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Needles").field("secrets", &self.0.secrets.len()).finish_non_exhaustive()
    }
}

/// What stands at some place of a text.
enum Here<'a> {
    Nothing,
    /// It could be a needle: its end is not there yet.
    Perhaps,
    Needle(&'a Needle),
}

/// How long what stands in place of a value is.
#[derive(Debug, Clone, Copy)]
enum Length {
    Any,
    /// As long as the value.
    Same,
}

impl Needle {
    fn write_instead(&self, length: Length, to: &mut Vec<u8>) {
        let end = to.len() + self.value.len();
        match length {
            Length::Any => to.extend_from_slice(&self.instead),
            Length::Same => {
                if self.instead.len() <= self.value.len() {
                    to.extend_from_slice(&self.instead);
                }
                to.resize(end, b'*');
            }
        }
    }
}

impl Needles {
    /// All forms of these secrets.
    pub(super) fn of(secrets: &[(&SecretName, &str)]) -> Self {
        let mut by_first: Vec<Vec<Needle>> = Vec::new();
        for (name, secret) in secrets {
            let instead = format!("[secret {name}]").into_bytes();
            let forms = forms::all(secret).into_iter().filter(|form| form.len() >= VALUE_MIN);
            for value in forms {
                by_first.resize_with(256, Vec::new);
                let alike = &mut by_first[usize::from(value[0])];
                if !alike.iter().any(|needle| needle.value == value) {
                    alike.push(Needle { value, instead: instead.clone() });
                }
            }
        }
        for alike in &mut by_first {
            alike.sort_by_key(|needle| std::cmp::Reverse(needle.value.len()));
        }
        let secrets = secrets.iter().map(|(name, value)| ((*name).clone(), (*value).to_owned()));
        Self(Arc::new(Sorted { secrets: secrets.collect(), by_first }))
    }

    /// Whether these are the needles of these very secrets.
    pub(super) fn are_of(&self, secrets: &[(&SecretName, &str)]) -> bool {
        let mine = self.0.secrets.iter().map(|(name, value)| (name, value.as_str()));
        mine.eq(secrets.iter().copied())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.by_first.is_empty()
    }

    fn beginning(&self, byte: u8) -> &[Needle] {
        self.0.by_first.get(usize::from(byte)).map_or(&[], Vec::as_slice)
    }

    fn here(&self, rest: &[u8], last: bool) -> Here<'_> {
        let Some(first) = rest.first() else { return Here::Nothing };
        for needle in self.beginning(*first) {
            if rest.starts_with(&needle.value) {
                return Here::Needle(needle);
            }
            if !last && needle.value.starts_with(rest) {
                return Here::Perhaps;
            }
        }
        Here::Nothing
    }

    /// What of `text` can be shown, and how much of its end has to wait for what follows.
    fn clean(&self, text: &[u8], last: bool, length: Length) -> (Vec<u8>, usize) {
        let mut clean = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            match self.here(&text[at..], last) {
                Here::Nothing => {
                    let rest = &text[at + 1..];
                    let skip = rest.iter().position(|byte| !self.beginning(*byte).is_empty());
                    let next = at + 1 + skip.unwrap_or(rest.len());
                    clean.extend_from_slice(&text[at..next]);
                    at = next;
                }
                Here::Perhaps => break,
                Here::Needle(needle) => {
                    needle.write_instead(length, &mut clean);
                    at += needle.value.len();
                }
            }
        }
        (clean, text.len() - at)
    }

    pub(super) fn clean_headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            let (clean, _) = self.clean(value.as_bytes(), true, Length::Any);
            if clean != value.as_bytes()
                && let Ok(clean) = HeaderValue::from_bytes(&clean)
            {
                *value = clean;
            }
        }
    }
}

/// Looks through a stream, whose length stays the same. Holds back less than the longest needle, and
/// only what could be the beginning of one.
#[derive(Debug)]
pub(super) struct Sieve {
    needles: Needles,
    held: Vec<u8>,
}

impl Sieve {
    pub(super) fn new(needles: Needles) -> Self {
        Self { needles, held: Vec::new() }
    }

    /// What can be passed on, now that this came.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(chunk);
        let (clean, waiting) = self.needles.clean(&self.held, false, Length::Same);
        self.held.drain(..self.held.len() - waiting);
        clean
    }

    /// What is left when nothing more comes.
    pub(super) fn end(&mut self) -> Vec<u8> {
        let held = std::mem::take(&mut self.held);
        self.needles.clean(&held, true, Length::Same).0
    }
}

/// The body of an answer, unpacked if it is packed, and looked through while it streams.
pub(super) struct Redacted {
    inner: Incoming,
    decoder: Option<Decoder>,
    /// What has to be unpacked yet.
    coded: Bytes,
    needles: Needles,
    sieve: Sieve,
    ready: VecDeque<Frame<Bytes>>,
    ended: bool,
}

impl Redacted {
    pub(super) fn new(inner: Incoming, coding: Option<Coding>, needles: Needles) -> Self {
        let (decoder, coded) = (coding.map(Decoder::new), Bytes::new());
        let (sieve, ready) = (Sieve::new(needles.clone()), VecDeque::new());
        Self { inner, decoder, coded, needles, sieve, ready, ended: false }
    }

    fn take(&mut self, frame: Frame<Bytes>) -> io::Result<()> {
        let trailers = match frame.into_data() {
            Ok(data) if self.decoder.is_some() => {
                self.coded = data;
                return Ok(());
            }
            Ok(data) => {
                self.pass(|sieve| sieve.push(&data));
                return Ok(());
            }
            Err(frame) => frame.into_trailers(),
        };
        if let Ok(mut trailers) = trailers {
            self.end()?;
            self.needles.clean_headers(&mut trailers);
            self.ready.push_back(Frame::trailers(trailers));
        }
        Ok(())
    }

    /// Unpacks some of what came.
    fn unpack(&mut self) -> io::Result<()> {
        let Some(decoder) = &mut self.decoder else { return Ok(()) };
        let plain = decoder.step(&mut self.coded)?;
        self.pass(|sieve| sieve.push(&plain));
        Ok(())
    }

    /// Nothing more of the body comes.
    fn end(&mut self) -> io::Result<()> {
        if let Some(mut decoder) = self.decoder.take() {
            let plain = decoder.end()?;
            self.pass(|sieve| sieve.push(&plain));
        }
        self.pass(Sieve::end);
        Ok(())
    }

    fn pass(&mut self, clean: impl FnOnce(&mut Sieve) -> Vec<u8>) {
        let clean = clean(&mut self.sieve);
        if !clean.is_empty() {
            self.ready.push_back(Frame::data(clean.into()));
        }
    }
}

impl HttpBody for Redacted {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(frame)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let done = if self.coded.is_empty() {
                match std::task::ready!(Pin::new(&mut self.inner).poll_frame(context)) {
                    Some(Ok(frame)) => self.take(frame),
                    Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                    None => {
                        self.ended = true;
                        self.end()
                    }
                }
            } else {
                self.unpack()
            };
            if let Err(error) = done {
                self.ended = true;
                return Poll::Ready(Some(Err(error.into())));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.ready.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needles(values: &[(&str, &str)]) -> Needles {
        let named =
            values.iter().map(|(value, name)| (name.parse::<SecretName>().unwrap(), *value));
        let named: Vec<_> = named.collect();
        Needles::of(&named.iter().map(|(name, value)| (name, *value)).collect::<Vec<_>>())
    }

    fn sieved(needles: &Needles, chunks: &[&str]) -> (Vec<String>, String) {
        let mut sieve = Sieve::new(needles.clone());
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let passed = chunks.iter().map(|chunk| text(sieve.push(chunk.as_bytes()))).collect();
        let end = text(sieve.end());
        (passed, end)
    }

    #[test]
    fn a_value_is_found_wherever_it_is_split() {
        let text = "a s3cr3t-is-longer, and s3cr3t-is-longer";
        let needles = needles(&[("s3cr3t-is-longer", "KEY")]);
        for first in 0..=text.len() {
            for second in first..=text.len() {
                let chunks = [&text[..first], &text[first..second], &text[second..]];
                let (passed, end) = sieved(&needles, &chunks);
                assert_eq!(passed.concat() + &end, "a [secret KEY]****, and [secret KEY]****");
            }
        }
    }

    #[test]
    fn only_what_could_be_a_beginning_waits() {
        let needles = needles(&[("s3cr3t", "KEY")]);
        let (passed, end) = sieved(&needles, &["hello\n", "s3c", "x s3cr3", ""]);
        assert_eq!(passed, ["hello\n", "", "s3cx ", ""]);
        assert_eq!(end, "s3cr3");
    }

    #[test]
    fn of_two_that_begin_alike_the_longer_is_found() {
        let needles = needles(&[("token", "S"), ("token-long-one", "L")]);
        let (passed, end) = sieved(&needles, &["token", "-long-one token-lo", "g"]);
        assert_eq!(passed.concat() + &end, "[secret L]**** *****-log");
        let (passed, end) = sieved(&needles, &["token-l"]);
        assert_eq!(passed.concat() + &end, "*****-l");
    }

    #[test]
    fn a_value_that_repeats_itself_is_found_behind_a_false_start() {
        let needles = needles(&[("aaab", "KEY")]);
        let (passed, end) = sieved(&needles, &["aa", "aa", "b", "aaa"]);
        assert_eq!(passed.concat() + &end, "a****aaa");
    }

    #[test]
    fn what_is_too_short_to_be_a_secret_is_left() {
        assert!(needles(&[("abc", "A"), ("", "B")]).is_empty());
    }

    #[test]
    fn headers_are_cleaned_and_nothing_shows_a_value() {
        let needles = needles(&[("s3cr3t", "KEY")]);
        let mut headers = HeaderMap::new();
        headers.insert("x-echo", HeaderValue::from_static("Bearer s3cr3t"));
        headers.insert("x-other", HeaderValue::from_static("s3cr3"));
        needles.clean_headers(&mut headers);
        assert_eq!(headers["x-echo"], "Bearer [secret KEY]");
        assert_eq!(headers["x-other"], "s3cr3");
        let sieve = Sieve::new(needles);
        assert!(!format!("{sieve:?}").contains("s3cr3t"));
    }
}
