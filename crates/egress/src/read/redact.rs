//! What was put into a request does not come back with the answer.
//!
//! A service that repeats what it was sent would give a secret to the sandbox. So in the answer to a
//! request that got secrets their values are replaced by `[secret NAME]`, in headers, in trailers and in
//! the body while it streams. In bodies what stands in place of a value is as long as it (the rest is
//! stars): answers, ranges and messages say how long they are.
//!
//! Limits: found are the value itself and each form that it was sent in (with percent signs, as JSON,
//! in `Basic` credentials). A service that encodes it in another way, compresses although it was asked
//! not to, gives it out in pieces (ranges), or in the answer to a later request, gives it away: bind
//! secrets to hosts that don't.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http::header::HeaderValue;
use hyper::body::{Body as HttpBody, Frame, Incoming};
use torpor_protocol::SecretName;

use super::body::BoxError;

/// Shortest value that is looked for. Shorter ones hide nothing, and would tear answers apart.
const VALUE_MIN: usize = 4;

/// What must not come back, each with what stands in its place.
#[derive(Clone, Default)]
pub(super) struct Needles {
    needles: Vec<Needle>,
    /// Whether one begins with this byte; empty if there is none.
    firsts: Vec<bool>,
}

#[derive(Clone)]
struct Needle {
    value: Vec<u8>,
    instead: Vec<u8>,
}

/// Shows nothing of the values.
impl fmt::Debug for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Needles").field("count", &self.needles.len()).finish_non_exhaustive()
    }
}

/// What stands at some place of a text.
enum Here<'a> {
    Nothing,
    /// It could be a needle: its end is not there yet.
    Perhaps,
    Needle(&'a Needle),
}

impl Needles {
    /// Also looks for this form of a secret.
    pub(super) fn add(&mut self, value: &[u8], name: &SecretName) {
        let known = self.needles.iter().any(|needle| needle.value == value);
        if value.len() < VALUE_MIN || known {
            return;
        }
        self.firsts.resize(256, false);
        self.firsts[usize::from(value[0])] = true;
        let instead = format!("[secret {name}]").into_bytes();
        self.needles.push(Needle { value: value.to_vec(), instead });
        // The longest first: one may begin another.
        self.needles.sort_by_key(|needle| std::cmp::Reverse(needle.value.len()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.needles.is_empty()
    }

    /// What stands in place of each is as long as it.
    fn padded(mut self) -> Self {
        for Needle { value, instead } in &mut self.needles {
            if instead.len() > value.len() {
                instead.clear();
            }
            instead.resize(value.len(), b'*');
        }
        self
    }

    fn begins(&self, byte: u8) -> bool {
        self.firsts.get(usize::from(byte)).copied().unwrap_or_default()
    }

    fn here(&self, rest: &[u8], last: bool) -> Here<'_> {
        if !rest.first().is_some_and(|first| self.begins(*first)) {
            return Here::Nothing;
        }
        for needle in &self.needles {
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
    fn clean(&self, text: &[u8], last: bool) -> (Vec<u8>, usize) {
        let mut clean = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            match self.here(&text[at..], last) {
                Here::Nothing => {
                    let rest = &text[at + 1..];
                    let skip = rest.iter().position(|byte| self.begins(*byte));
                    let next = at + 1 + skip.unwrap_or(rest.len());
                    clean.extend_from_slice(&text[at..next]);
                    at = next;
                }
                Here::Perhaps => break,
                Here::Needle(needle) => {
                    clean.extend_from_slice(&needle.instead);
                    at += needle.value.len();
                }
            }
        }
        (clean, text.len() - at)
    }

    pub(super) fn clean_headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            let (clean, _) = self.clean(value.as_bytes(), true);
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
        Self { needles: needles.padded(), held: Vec::new() }
    }

    /// What can be passed on, now that this came.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(chunk);
        let (clean, waiting) = self.needles.clean(&self.held, false);
        self.held.drain(..self.held.len() - waiting);
        clean
    }

    /// What is left when nothing more comes.
    pub(super) fn end(&mut self) -> Vec<u8> {
        let (clean, _) = self.needles.clean(&std::mem::take(&mut self.held), true);
        clean
    }
}

/// The body of an answer, looked through while it streams.
pub(super) struct Redacted {
    inner: Incoming,
    needles: Needles,
    sieve: Sieve,
    ready: VecDeque<Frame<Bytes>>,
    ended: bool,
}

impl Redacted {
    pub(super) fn new(inner: Incoming, needles: Needles) -> Self {
        let sieve = Sieve::new(needles.clone());
        Self { inner, needles, sieve, ready: VecDeque::new(), ended: false }
    }

    fn take(&mut self, frame: Frame<Bytes>) {
        let trailers = match frame.into_data() {
            Ok(data) => return self.pass(|sieve| sieve.push(&data)),
            Err(frame) => frame.into_trailers(),
        };
        if let Ok(mut trailers) = trailers {
            self.pass(Sieve::end);
            self.needles.clean_headers(&mut trailers);
            self.ready.push_back(Frame::trailers(trailers));
        }
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
            match std::task::ready!(Pin::new(&mut self.inner).poll_frame(context)) {
                Some(Ok(frame)) => self.take(frame),
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                None => {
                    self.ended = true;
                    self.pass(Sieve::end);
                }
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
        let mut needles = Needles::default();
        for (value, name) in values {
            needles.add(value.as_bytes(), &name.parse().unwrap());
        }
        needles
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
