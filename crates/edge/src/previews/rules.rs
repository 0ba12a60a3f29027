//! What is put into requests and answers of a preview, and whose pages may use it (CORS).
//!
//! Rules are checked when they are made: one that would break the connection, lie about the length of
//! a body, or touch what is ours is refused.

use std::collections::BTreeMap;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::uri::Uri;
use http::{Method, Request, Response, StatusCode};
use torpor_protocol::preview::{ORIGINS_MAX, Preview, RULES_MAX, TOKEN_COOKIE, TOKEN_HEADER};

use torpor_service::headers::TRAVEL_HEADERS;
use torpor_service::error::{Error, Result};

/// Longest value of a header rule: half of what servers commonly take for all headers together.
const VALUE_MAX: usize = 4096;
/// How long a browser may believe the answer to a preflight; what Chromium takes at most is two hours.
const PREFLIGHT_SECS: u32 = 600;

/// What is ours, besides what says how a message travels.
const OURS: [&str; 3] = ["x-request-id", "x-torpor-preview", TOKEN_HEADER];

const REQUEST_PRIVATE: HeaderName =
    HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// The rules of a preview, ready for use.
#[derive(Debug, Clone, Default)]
pub(super) struct Rules {
    requests: HeaderMap,
    /// An empty value: it is taken away.
    answers: HeaderMap,
    cors: Cors,
}

#[derive(Debug, Clone, Default)]
enum Cors {
    /// The application's own business.
    #[default]
    None,
    Everybody,
    Origins(Vec<String>),
}

impl Rules {
    /// Refuses what can't be done.
    pub(super) fn of(preview: &Preview) -> Result<Self> {
        Ok(Self {
            requests: parse(&preview.request_headers, "request_headers")?,
            answers: parse(&preview.response_headers, "response_headers")?,
            cors: Cors::parse(&preview.cors)?,
        })
    }

    /// Puts into a request what belongs there.
    pub(super) fn dress(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.requests {
            set(headers, name, value);
        }
    }

    /// Puts into an answer what belongs there. `origin`: of the page that asked.
    pub(super) fn finish(&self, headers: &mut HeaderMap, origin: Option<&HeaderValue>) {
        self.cors.finish(headers, origin);
        for (name, value) in &self.answers {
            set(headers, name, value);
        }
    }

    /// Whether pages of this origin may act for whoever looks at them.
    pub(super) fn trusts(&self, origin: &HeaderValue) -> bool {
        matches!(self.cors, Cors::Origins(_)) && self.cors.admits(origin)
    }

    /// The answer to a browser that asks whether a page may ask, if it is ours to give.
    pub(super) fn preflight<A, B: Default>(&self, request: &Request<A>) -> Option<Response<B>> {
        let asked = request.headers();
        let method = asked.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
        let origin = asked.get(header::ORIGIN)?;
        let said = self.answers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        if request.method() != Method::OPTIONS || (matches!(self.cors, Cors::None) && !said) {
            return None;
        }
        let mut response = Response::new(B::default());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let headers = response.headers_mut();
        if said || self.cors.admits(origin) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, method.clone());
            if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
                headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
            }
            if asked.contains_key(REQUEST_PRIVATE) {
                headers.insert(ALLOW_PRIVATE, HeaderValue::from_static("true"));
            }
            headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECS.into());
        }
        self.finish(headers, Some(origin));
        Some(response)
    }
}

impl Cors {
    fn parse(origins: &[String]) -> Result<Self> {
        if origins.len() > ORIGINS_MAX {
            return Err(Error::invalid(format!("cors: at most {ORIGINS_MAX} origins")));
        }
        if origins.is_empty() {
            return Ok(Self::None);
        }
        if origins == ["*"] {
            return Ok(Self::Everybody);
        }
        let origins = origins.iter().map(|text| {
            is_origin(text).then(|| text.to_ascii_lowercase()).ok_or_else(|| {
                Error::invalid(format!(
                    "cors: {text:.80?} is not an origin such as https://app.example.com; `*` alone \
                     is for all"
                ))
            })
        });
        origins.collect::<Result<_>>().map(Self::Origins)
    }

    fn admits(&self, origin: &HeaderValue) -> bool {
        match self {
            Self::None => false,
            Self::Everybody => true,
            Self::Origins(origins) => {
                origins.iter().any(|known| known.as_bytes().eq_ignore_ascii_case(origin.as_bytes()))
            }
        }
    }

    fn finish(&self, headers: &mut HeaderMap, origin: Option<&HeaderValue>) {
        if matches!(self, Self::None) {
            return;
        }
        headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        headers.remove(header::ACCESS_CONTROL_ALLOW_CREDENTIALS);
        let origin = origin.filter(|origin| self.admits(origin));
        match (self, origin) {
            (Self::Everybody, Some(_)) => {
                let all = HeaderValue::from_static("*");
                headers.entry(header::ACCESS_CONTROL_EXPOSE_HEADERS).or_insert(all.clone());
                headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, all);
            }
            (Self::Origins(_), Some(origin)) => {
                headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
                let yes = HeaderValue::from_static("true");
                headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, yes);
            }
            (Self::None | Self::Everybody | Self::Origins(_), _) => {}
        }
        vary(headers);
    }
}

/// Caches must not give one origin's answer to another.
fn vary(headers: &mut HeaderMap) {
    let origin = |value: &HeaderValue| {
        let mut names = value.as_bytes().split(|byte| *byte == b',');
        names.any(|name| {
            [&b"origin"[..], b"*"].iter().any(|n| name.trim_ascii().eq_ignore_ascii_case(n))
        })
    };
    if !headers.get_all(header::VARY).iter().any(origin) {
        headers.append(header::VARY, HeaderValue::from_static("Origin"));
    }
}

/// Scheme and authority, nothing else.
fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
    let whole = text.split_once("://").is_some_and(|(_, rest)| rest == authority);
    web && whole && !authority.contains(['@', '*'])
}

/// An empty value takes the header away.
fn set(headers: &mut HeaderMap, name: &HeaderName, value: &HeaderValue) {
    if value.is_empty() {
        headers.remove(name);
    } else {
        headers.insert(name, value.clone());
    }
}

fn parse(rules: &BTreeMap<String, String>, field: &str) -> Result<HeaderMap> {
    if rules.len() > RULES_MAX {
        return Err(Error::invalid(format!("{field}: at most {RULES_MAX} headers")));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in rules {
        let refuse = |why: &str| Error::invalid(format!("{field}: {name:.80?} {why}"));
        let parsed: HeaderName = name.parse().map_err(|_| refuse("is not the name of a header"))?;
        let name = parsed.as_str();
        if TRAVEL_HEADERS.contains(&name) || OURS.contains(&name) {
            return Err(refuse("can't be set: it belongs to the connection, or to us"));
        }
        let cookie = [header::COOKIE, header::SET_COOKIE].contains(&parsed);
        if cookie && value.contains(TOKEN_COOKIE) {
            return Err(refuse("can't have a cookie of ours"));
        }
        if value.len() > VALUE_MAX {
            return Err(refuse("has a value of more than 4096 bytes"));
        }
        let text = HeaderValue::try_from(value.trim());
        let text = text.map_err(|_| refuse("has a value with control characters"))?;
        if headers.insert(parsed, text).is_some() {
            return Err(refuse("is there twice"));
        }
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(rules: &[(&str, &str)]) -> BTreeMap<String, String> {
        rules.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn rules(cors: &[&str], answers: &[(&str, &str)]) -> Rules {
        let cors: Vec<_> = cors.iter().map(|text| (*text).to_owned()).collect();
        Rules {
            requests: HeaderMap::new(),
            answers: parse(&pairs(answers), "response_headers").unwrap(),
            cors: Cors::parse(&cors).unwrap(),
        }
    }

    fn asked(rules: &Rules, origin: &str) -> Option<Response<()>> {
        let request = Request::options("/")
            .header("origin", origin)
            .header("access-control-request-method", "PUT")
            .header("access-control-request-headers", "x-a");
        rules.preflight(&request.body(()).unwrap())
    }

    #[test]
    fn rules_that_would_break_a_message_are_refused() {
        for (name, value) in [
            ("Host", "x"),
            ("content-length", "1"),
            ("Connection", "close"),
            ("transfer-encoding", "chunked"),
            ("upgrade", "websocket"),
            ("x-torpor-preview-token", "t"),
            ("a b", "x"),
            ("", "x"),
            ("x-a", "line\nbreak"),
            ("cookie", "torpor_preview=x"),
            ("set-cookie", "torpor_preview=x; Path=/"),
        ] {
            assert!(parse(&pairs(&[(name, value)]), "f").is_err(), "{name}: {value}");
        }
        assert!(parse(&pairs(&[("x-a", "1"), ("X-A", "2")]), "f").is_err());
        assert!(parse(&pairs(&[("authorization", "Bearer x"), ("x-ü", "y")]), "f").is_err());
        assert!(parse(&pairs(&[("Authorization", "Bearer ü")]), "f").is_ok());
    }

    #[test]
    fn an_answer_gets_what_the_rules_say_and_an_empty_value_takes_away() {
        let rules = rules(&[], &[("x-frame-options", ""), ("x-a", "ours")]);
        let mut headers = HeaderMap::new();
        for (name, value) in [("x-frame-options", "DENY"), ("x-a", "1"), ("x-a", "2"), ("x-b", "3")]
        {
            headers.append(name, value.parse().unwrap());
        }
        rules.finish(&mut headers, None);
        assert_eq!(headers.get_all("x-a").iter().collect::<Vec<_>>(), ["ours"]);
        assert!(!headers.contains_key("x-frame-options"));
        assert_eq!(headers["x-b"], "3");
    }

    #[test]
    fn a_named_origin_gets_in_with_credentials_and_others_do_not() {
        let rules = rules(&["https://app.example.com"], &[]);
        let mut headers = HeaderMap::new();
        headers.insert("access-control-allow-origin", HeaderValue::from_static("*"));
        rules.finish(&mut headers, Some(&HeaderValue::from_static("https://evil.example")));
        assert!(!headers.contains_key("access-control-allow-origin"));
        assert_eq!(headers["vary"], "Origin");
        rules.finish(&mut headers, Some(&HeaderValue::from_static("https://app.example.com")));
        assert_eq!(headers["access-control-allow-origin"], "https://app.example.com");
        assert_eq!(headers["access-control-allow-credentials"], "true");
        assert_eq!(headers.get_all("vary").iter().count(), 1);
        assert_eq!(asked(&rules, "null").unwrap().headers().len(), 1);
    }

    #[test]
    fn everybody_gets_in_without_credentials() {
        let rules = rules(&["*"], &[]);
        let mut headers = HeaderMap::new();
        headers.insert("access-control-allow-credentials", HeaderValue::from_static("true"));
        rules.finish(&mut headers, Some(&HeaderValue::from_static("https://any.example")));
        assert_eq!(headers["access-control-allow-origin"], "*");
        assert!(!headers.contains_key("access-control-allow-credentials"));
    }

    #[test]
    fn a_preflight_is_answered_where_somebody_said_something_about_it() {
        let answer = asked(&rules(&["*"], &[]), "https://a.example").unwrap();
        assert_eq!(answer.status(), 204);
        assert_eq!(answer.headers()["access-control-allow-methods"], "PUT");
        assert_eq!(answer.headers()["access-control-allow-headers"], "x-a");
        assert!(asked(&rules(&[], &[]), "https://a.example").is_none());
        let said = rules(&[], &[("access-control-allow-origin", "https://b.example")]);
        let answer = asked(&said, "https://a.example").unwrap();
        assert_eq!(answer.headers()["access-control-allow-origin"], "https://b.example");
        let plain = Request::options("/").header("origin", "https://a.example").body(()).unwrap();
        assert!(rules(&["*"], &[]).preflight::<_, ()>(&plain).is_none());
    }

    #[test]
    fn what_is_no_origin_is_refused() {
        for text in [
            "app.example.com",
            "https://app.example.com/",
            "https://*.example.com",
            "ftp://a",
            "null",
            "",
            "https://u@a.example",
        ] {
            assert!(Cors::parse(&[text.to_owned()]).is_err(), "{text}");
        }
        assert!(Cors::parse(&["*".to_owned(), "https://a.example".to_owned()]).is_err());
        assert!(Cors::parse(&["http://localhost:3000".to_owned()]).is_ok());
    }
}
