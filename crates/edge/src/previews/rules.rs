//! What a preview's rules do to requests and answers: headers, and whose pages may use it (CORS).

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use torpor_service::previews::rules::{Cors, HeaderRules, Rules};

/// How long a browser may believe the answer to a preflight; what Chromium takes at most is two hours.
const PREFLIGHT_SECS: u32 = 600;

const REQUEST_PRIVATE: HeaderName =
    HeaderName::from_static("access-control-request-private-network");
const ALLOW_PRIVATE: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// Puts into a request what belongs there.
pub(super) fn dress(rules: &Rules, headers: &mut HeaderMap) {
    apply(&rules.requests, headers);
}

/// Puts into an answer what belongs there. `origin`: of the page that asked.
pub(super) fn finish(rules: &Rules, headers: &mut HeaderMap, origin: Option<&HeaderValue>) {
    share(&rules.cors, headers, origin);
    apply(&rules.answers, headers);
}

/// The answer to a browser that asks whether a page may ask, if it is ours to give.
pub(super) fn preflight<A, B: Default>(rules: &Rules, request: &Request<A>) -> Option<Response<B>> {
    let asked = request.headers();
    let method = asked.get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
    let origin = asked.get(header::ORIGIN)?;
    let said = rules.answers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN.as_str());
    if request.method() != Method::OPTIONS || (matches!(rules.cors, Cors::None) && !said) {
        return None;
    }
    let mut response = Response::new(B::default());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    if said || rules.cors.admits(origin.as_bytes()) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, method.clone());
        if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
        }
        if asked.contains_key(REQUEST_PRIVATE) {
            headers.insert(ALLOW_PRIVATE, HeaderValue::from_static("true"));
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_SECS.into());
    }
    finish(rules, headers, Some(origin));
    Some(response)
}

/// Says whose pages may read the answer.
fn share(cors: &Cors, headers: &mut HeaderMap, origin: Option<&HeaderValue>) {
    if matches!(cors, Cors::None) {
        return;
    }
    headers.remove(header::ACCESS_CONTROL_ALLOW_ORIGIN);
    headers.remove(header::ACCESS_CONTROL_ALLOW_CREDENTIALS);
    let origin = origin.filter(|origin| cors.admits(origin.as_bytes()));
    match (cors, origin) {
        (Cors::Everybody, Some(_)) => {
            let all = HeaderValue::from_static("*");
            headers.entry(header::ACCESS_CONTROL_EXPOSE_HEADERS).or_insert(all.clone());
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, all);
        }
        (Cors::Origins(_), Some(origin)) => {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            let yes = HeaderValue::from_static("true");
            headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, yes);
        }
        (Cors::None | Cors::Everybody | Cors::Origins(_), _) => {}
    }
    vary(headers);
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

/// An empty value takes the header away. All were checked when the rules were made.
fn apply(rules: &HeaderRules, headers: &mut HeaderMap) {
    for (name, value) in rules {
        let name = HeaderName::try_from(name).ok();
        let Some((name, value)) = name.zip(HeaderValue::try_from(value).ok()) else { continue };
        if value.is_empty() {
            headers.remove(name);
        } else {
            headers.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(cors: &[&str], answers: &[(&str, &str)]) -> Rules {
        let cors: Vec<_> = cors.iter().map(|text| (*text).to_owned()).collect();
        let answers = answers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Rules { answers: answers.collect(), cors: Cors::parse(&cors).unwrap(), ..Rules::default() }
    }

    fn asked(rules: &Rules, origin: &str) -> Option<Response<()>> {
        let request = Request::options("/")
            .header("origin", origin)
            .header("access-control-request-method", "PUT")
            .header("access-control-request-headers", "x-a");
        preflight(rules, &request.body(()).unwrap())
    }

    #[test]
    fn an_answer_gets_what_the_rules_say_and_an_empty_value_takes_away() {
        let rules = rules(&[], &[("x-frame-options", ""), ("x-a", "ours")]);
        let mut headers = HeaderMap::new();
        for (name, value) in [("x-frame-options", "DENY"), ("x-a", "1"), ("x-a", "2"), ("x-b", "3")]
        {
            headers.append(name, value.parse().unwrap());
        }
        finish(&rules, &mut headers, None);
        assert_eq!(headers.get_all("x-a").iter().collect::<Vec<_>>(), ["ours"]);
        assert!(!headers.contains_key("x-frame-options"));
        assert_eq!(headers["x-b"], "3");
    }

    #[test]
    fn a_named_origin_gets_in_with_credentials_and_others_do_not() {
        let rules = rules(&["https://app.example.com"], &[]);
        let mut headers = HeaderMap::new();
        headers.insert("access-control-allow-origin", HeaderValue::from_static("*"));
        finish(&rules, &mut headers, Some(&HeaderValue::from_static("https://evil.example")));
        assert!(!headers.contains_key("access-control-allow-origin"));
        assert_eq!(headers["vary"], "Origin");
        finish(&rules, &mut headers, Some(&HeaderValue::from_static("https://app.example.com")));
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
        finish(&rules, &mut headers, Some(&HeaderValue::from_static("https://any.example")));
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
        assert!(preflight::<_, ()>(&rules(&["*"], &[]), &plain).is_none());
    }
}
