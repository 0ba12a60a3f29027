//! Where a request goes: the daemon's address, and paths with their parts encoded. Pure.

use std::fmt;
use std::str::FromStr;

use crate::Subject;

/// The daemon's address: `http://host:port` or `https://host`, perhaps with a path before `/v1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server(String);

impl Server {
    pub fn is_encrypted(&self) -> bool {
        self.0.starts_with("https://")
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            "an address is such as http://127.0.0.1:8900 or https://torpor.example.org".to_owned()
        };
        let (scheme, rest) = match text.strip_prefix("https://") {
            Some(rest) => ("https", rest),
            None => ("http", text.strip_prefix("http://").unwrap_or(text)),
        };
        let rest = rest.trim_end_matches('/');
        if rest.contains("://") || rest.contains(['?', '#', '@']) {
            return Err(bad());
        }
        let url = format!("{scheme}://{rest}");
        let uri: http::Uri = url.parse().map_err(|_| bad())?;
        match uri.host() {
            Some(host) if !host.is_empty() => Ok(Self(url)),
            Some(_) | None => Err(bad()),
        }
    }
}

/// Path and query of a request. What is not fixed by the API is encoded.
#[derive(Debug, Clone)]
pub struct Route {
    path: String,
    query: String,
    /// What it is about.
    pub(crate) about: Option<Subject>,
}

impl Route {
    /// A fixed path such as `/v1/images`.
    pub fn new(path: &str) -> Self {
        Self { path: path.to_owned(), query: String::new(), about: None }
    }

    /// `/v1/sandboxes/{sandbox}`
    pub fn sandbox(sandbox: &impl ToString) -> Self {
        let sandbox = sandbox.to_string();
        let route = Self::new("/v1/sandboxes").part(&sandbox);
        Self { about: Some(Subject::Sandbox(sandbox)), ..route }
    }

    /// `/v1/snapshots/{snapshot}`
    pub fn snapshot(snapshot: &impl ToString) -> Self {
        let snapshot = snapshot.to_string();
        let route = Self::new("/v1/snapshots").part(&snapshot);
        Self { about: Some(Subject::Snapshot(snapshot)), ..route }
    }

    /// Fixed text after what is there, such as `/files/list`.
    pub fn then(mut self, fixed: &str) -> Self {
        self.path.push_str(fixed);
        self
    }

    /// One more part of the path, whatever is in it.
    pub fn part(mut self, text: &str) -> Self {
        self.path.push('/');
        self.path.push_str(&encode(text));
        self
    }

    pub fn query(mut self, key: &str, value: &str) -> Self {
        self.query.push(if self.query.is_empty() { '?' } else { '&' });
        self.query.push_str(&format!("{key}={}", encode(value)));
        self
    }

    pub(crate) fn uri(&self, server: &Server) -> String {
        format!("{}{}{}", server.0, self.path, self.query)
    }
}

fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(char::from(byte));
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_in_a_name_stays_one_part() {
        let server: Server = "http://h:1".parse().unwrap();
        let route = Route::new("/v1/images").part("torpor/base").query("path", "/a b&c=ü?#%");
        assert_eq!(
            route.uri(&server),
            "http://h:1/v1/images/torpor%2Fbase?path=%2Fa%20b%26c%3D%C3%BC%3F%23%25"
        );
    }

    #[test]
    fn an_address_may_leave_out_what_is_clear() {
        let read = |text: &str| text.parse::<Server>().map(|server| server.0);
        assert_eq!(read("127.0.0.1:8900").unwrap(), "http://127.0.0.1:8900");
        assert_eq!(read("http://host/").unwrap(), "http://host");
        assert_eq!(read("http://[::1]:8900").unwrap(), "http://[::1]:8900");
        for text in ["", "http://", "ftp://x", "http://a b", "http://user@host", "http://h?x=1"] {
            assert!(read(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn encryption_is_what_the_address_says() {
        let read = |text: &str| text.parse::<Server>().unwrap();
        assert!(read("https://example.org/").is_encrypted());
        assert_eq!(read("https://example.org:8443/x/").to_string(), "https://example.org:8443/x");
        assert!(!read("http://example.org").is_encrypted() && !read("https.org").is_encrypted());
        for text in ["https://", "https://http://x", "https://user@host"] {
            assert!(text.parse::<Server>().is_err(), "{text:?} was accepted");
        }
    }
}
