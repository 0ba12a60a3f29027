//! How a token travels: in a header, in the query of a URL, or, for browsers, in a cookie that they got
//! for it. Whatever of it was sent is taken out of the request, so that no application sees it.

use std::time::Duration;

use http::header::{COOKIE, HeaderMap, HeaderValue, SET_COOKIE};
use http::uri::PathAndQuery;
use http::{HeaderName, Uri};
use torpor_protocol::preview::{TOKEN_COOKIE, TOKEN_HEADER, TOKEN_QUERY};

/// Cookies of ours that are looked at in one request: more than one only comes from somebody else.
const COOKIES_MAX: usize = 8;

/// What of ours a request carried.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) header: Option<String>,
    pub(super) query: Option<String>,
    pub(super) cookies: Vec<String>,
}

impl Shown {
    /// Takes it out of a request.
    pub(super) fn take(uri: &mut Uri, headers: &mut HeaderMap) -> Self {
        let name = HeaderName::from_static(TOKEN_HEADER);
        let header = headers.get(&name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        headers.remove(name);
        Self { header, query: take_query(uri), cookies: take_cookies(headers) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.header.is_none() && self.query.is_none() && self.cookies.is_empty()
    }
}

/// Removes the token from the query; the rest stays as it is, byte for byte.
fn take_query(uri: &mut Uri) -> Option<String> {
    let query = uri.query()?;
    let is_ours = |pair: &str| pair.split('=').next() == Some(TOKEN_QUERY);
    let token = query.split('&').find(|pair| is_ours(pair))?;
    let token = token.split_once('=').map_or("", |(_, value)| value).to_owned();
    let rest: Vec<_> = query.split('&').filter(|pair| !is_ours(pair)).collect();
    let path = uri.path();
    let text = if rest.is_empty() { path.to_owned() } else { format!("{path}?{}", rest.join("&")) };
    let path: PathAndQuery = text.parse().expect("a part of a URL is one");
    let mut parts = std::mem::take(uri).into_parts();
    parts.path_and_query = Some(path);
    *uri = Uri::from_parts(parts).expect("it was a URL before");
    Some(token)
}

/// Removes our cookies; others stay as they are.
fn take_cookies(headers: &mut HeaderMap) -> Vec<String> {
    let mut ours = Vec::new();
    let mut rest = Vec::new();
    for value in headers.get_all(COOKIE) {
        let mut kept: Vec<&[u8]> = Vec::new();
        for pair in value.as_bytes().split(|byte| *byte == b';') {
            match cookie_of_ours(pair) {
                Some(value) => ours.push(String::from_utf8_lossy(value).into_owned()),
                None if pair.trim_ascii().is_empty() => {}
                None => kept.push(pair.trim_ascii()),
            }
        }
        if !kept.is_empty() {
            rest.push(HeaderValue::from_bytes(&kept.join(&b"; "[..])).expect("it was one before"));
        }
    }
    if !ours.is_empty() {
        headers.remove(COOKIE);
        for value in rest {
            headers.append(COOKIE, value);
        }
    }
    ours.truncate(COOKIES_MAX);
    ours
}

/// The value of a cookie that has our name.
fn cookie_of_ours(pair: &[u8]) -> Option<&[u8]> {
    let mut parts = pair.splitn(2, |byte| *byte == b'=');
    let name = parts.next()?.trim_ascii();
    let value = parts.next().unwrap_or_default().trim_ascii();
    (name == TOKEN_COOKIE.as_bytes()).then_some(value)
}

/// Removes cookies of our name from an answer: an application has no say in them.
pub fn drop_cookies(headers: &mut HeaderMap) {
    let own = |value: &HeaderValue| {
        let pair = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        // A browser sends a cookie without a name as its value alone: `=a=b` comes back as `a=b`.
        let pair = pair.trim_ascii_start();
        cookie_of_ours(pair.strip_prefix(b"=").unwrap_or(pair)).is_some()
    };
    if !headers.get_all(SET_COOKIE).iter().any(own) {
        return;
    }
    let kept: Vec<_> = headers.get_all(SET_COOKIE).iter().filter(|v| !own(v)).cloned().collect();
    headers.remove(SET_COOKIE);
    for value in kept {
        headers.append(SET_COOKIE, value);
    }
}

/// The cookie for a browser: for this host only, and for no script.
pub(super) fn cookie(value: &str, lasts: Option<Duration>, secure: bool) -> HeaderValue {
    let mut text = format!("{TOKEN_COOKIE}={value}; Path=/; HttpOnly; SameSite=Lax");
    if let Some(lasts) = lasts {
        text.push_str(&format!("; Max-Age={}", lasts.as_secs()));
    }
    if secure {
        text.push_str("; Secure");
    }
    HeaderValue::try_from(text).expect("ids and seals are fit for a header")
}

/// Where a browser goes for the same page without the token: a path, never another host.
pub(super) fn location(uri: &Uri) -> HeaderValue {
    let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    // `//host` and `/\host` would be read as another host.
    let bent = path.starts_with("//") || path.starts_with("/\\");
    let path = if bent { format!("/.{path}") } else { path.to_owned() };
    HeaderValue::try_from(path).unwrap_or(HeaderValue::from_static("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(uri: &str, headers: &[(&'static str, &str)]) -> (Shown, String, HeaderMap) {
        let mut uri: Uri = uri.parse().unwrap();
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let shown = Shown::take(&mut uri, &mut map);
        (shown, uri.to_string(), map)
    }

    #[test]
    fn a_token_leaves_the_query_and_nothing_else_does() {
        for (before, token, after) in [
            ("/a?torpor_preview_token=t", Some("t"), "/a"),
            ("/a?x=%20&torpor_preview_token=t&y=&z", Some("t"), "/a?x=%20&y=&z"),
            ("/?torpor_preview_token=t&torpor_preview_token=u", Some("t"), "/"),
            ("/a?torpor_preview_token", Some(""), "/a"),
            ("http://h/a?q&torpor_preview_token=t", Some("t"), "http://h/a?q"),
            ("/a?my_torpor_preview_token=t", None, "/a?my_torpor_preview_token=t"),
            ("/a?&&", None, "/a?&&"),
        ] {
            let (shown, uri, _) = taken(before, &[]);
            assert_eq!((shown.query.as_deref(), uri.as_str()), (token, after), "{before}");
        }
    }

    #[test]
    fn our_cookies_and_header_are_taken_out_and_others_stay() {
        let (shown, _, headers) = taken(
            "/",
            &[
                ("cookie", "a=1; torpor_preview=x.y; b=\"2\""),
                ("cookie", "torpor_preview=z"),
                ("cookie", "c=3"),
                ("x-torpor-preview-token", "t"),
                ("x-torpor-preview-token", "u"),
            ],
        );
        assert_eq!(shown.header.as_deref(), Some("t"));
        assert_eq!(shown.cookies, ["x.y", "z"]);
        let left: Vec<_> = headers.get_all("cookie").iter().collect();
        assert_eq!(left, ["a=1; b=\"2\"", "c=3"]);
        assert!(!headers.contains_key("x-torpor-preview-token"));
        let (shown, _, headers) = taken("/", &[("cookie", "torpor_previews=1;;d")]);
        assert!(shown.is_empty());
        assert_eq!(headers["cookie"], "torpor_previews=1;;d");
    }

    #[test]
    fn an_application_can_not_set_our_cookie() {
        let mut headers = HeaderMap::new();
        for value in [
            "torpor_preview=forged; Domain=example.org",
            " =torpor_preview=nameless",
            "torpor_preview",
            "own=1; Path=/",
        ] {
            headers.append(SET_COOKIE, value.parse().unwrap());
        }
        drop_cookies(&mut headers);
        assert_eq!(headers.get_all(SET_COOKIE).iter().collect::<Vec<_>>(), ["own=1; Path=/"]);
    }

    #[test]
    fn a_browser_is_never_sent_to_another_host() {
        for (uri, to) in [
            ("/a?b=c", "/a?b=c"),
            ("//evil.example/x", "/.//evil.example/x"),
            ("/\\evil.example", "/./\\evil.example"),
            ("http://h/", "/"),
        ] {
            assert_eq!(location(&uri.parse().unwrap()), to, "{uri}");
        }
    }

    #[test]
    fn a_cookie_is_for_this_host_and_no_script() {
        let text = cookie("token-a.b", Some(Duration::from_secs(60)), true);
        let text = text.to_str().unwrap();
        assert!(text.starts_with("torpor_preview=token-a.b; "), "{text}");
        for part in ["HttpOnly", "SameSite=Lax", "Secure", "Max-Age=60", "Path=/"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("Domain"));
        assert!(!cookie("x", None, false).to_str().unwrap().contains("Secure"));
    }
}
