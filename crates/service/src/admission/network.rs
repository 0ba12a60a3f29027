//! Which policies may be: limits, and what the routes of one may put into requests. Pure.
//!
//! The syntax of hosts, ranges and rules is checked where they are parsed (`torpor-protocol`).

use std::collections::HashSet;

use torpor_protocol::spec::Pairs;
use torpor_protocol::{HostBinding, HostPattern, Network, NetworkLimits, Route, SecretName};

use super::{Inadmissible, clip, invalid};
use crate::headers::{TRAVEL_HEADERS, is_value, name_of};

/// Bytes of a whole policy as JSON: it travels with every start of a machine and every status.
const POLICY_BYTES_MAX: usize = 16 * 1024;
/// Longest method and path of a route; the same as in an entry of a list.
const METHOD_MAX: usize = 32;
const PATH_MAX: usize = 1024;
/// Less than this the firewall can't measure; more than this is no limit.
const BYTES_PER_SEC: std::ops::RangeInclusive<u64> = 1024..=1 << 40;
/// What the host's connection tracking can hold is less.
const CONNECTIONS: std::ops::RangeInclusive<u32> = 1..=1_000_000;
/// What a placeholder begins and ends with.
const OPENING: &str = "{{";
const CLOSING: &str = "}}";
const FUNCTION: &str = "SECRET:";

/// Whether a sandbox may have this policy, as far as it says itself.
pub(super) fn check(network: &Network) -> Result<(), Inadmissible> {
    for (field, list) in [("network.allow", &network.allow), ("network.deny", &network.deny)] {
        at_most(field, list.len(), Network::ENTRIES_MAX)?;
    }
    at_most("network.routes", network.routes.len(), Network::ROUTES_MAX)?;
    at_most("network.secrets", network.secrets.len(), Network::ROUTES_MAX)?;
    network.routes.iter().try_for_each(check_route)?;
    check_limits(&network.limits)?;
    let bytes = serde_json::to_vec(network).map_or(usize::MAX, |json| json.len());
    if bytes > POLICY_BYTES_MAX {
        let why = format!("has {bytes} bytes as JSON, {POLICY_BYTES_MAX} are allowed");
        return invalid("network", why);
    }
    Ok(())
}

fn at_most(field: &'static str, has: usize, most: usize) -> Result<(), Inadmissible> {
    if has > most {
        return invalid(field, format!("has {has}, {most} are allowed"));
    }
    Ok(())
}

// === Routes ===

const ROUTES: &str = "network.routes";

fn check_route(route: &Route) -> Result<(), Inadmissible> {
    let Route { hosts, methods, paths, headers, body, query } = route;
    if hosts.is_empty() {
        return invalid(ROUTES, "a route has no hosts");
    }
    if headers.is_empty() && body.is_empty() && query.is_empty() {
        return invalid(ROUTES, format!("the route of {} puts nothing in", hosts[0]));
    }
    for has in [hosts.len(), methods.len(), paths.len(), headers.len(), body.len(), query.len()] {
        at_most(ROUTES, has, Network::ROUTES_MAX)?;
    }
    methods.iter().try_for_each(|method| check_method(method))?;
    paths.iter().try_for_each(|path| check_path(path))?;
    check_headers(headers)?;
    for (name, _) in body.iter().chain(query) {
        if name.is_empty() || name.chars().any(char::is_control) {
            return invalid(ROUTES, format!("{:?} is no name of a field", clip(name)));
        }
    }
    values(route).try_for_each(|text| {
        secrets_in(text)
            .map(drop)
            .or_else(|why| invalid(ROUTES, format!("{:?}: {why}", clip(text))))
    })
}

fn check_method(method: &str) -> Result<(), Inadmissible> {
    let is_one = (1..=METHOD_MAX).contains(&method.len())
        && method.bytes().all(|byte| byte.is_ascii_uppercase());
    if is_one {
        return Ok(());
    }
    invalid(ROUTES, format!("{:?} is no method such as GET", clip(method)))
}

fn check_path(path: &str) -> Result<(), Inadmissible> {
    let why = if !path.starts_with('/') {
        "begins with a slash"
    } else if path.len() > PATH_MAX {
        "has at most 1024 bytes"
    } else if path.contains(['?', '#', '*', ' ', '%', '\\']) || path.contains("/.") {
        "is what the paths of requests begin with, without `.`, `*`, `%` or a query"
    } else {
        return Ok(());
    };
    invalid(ROUTES, format!("{:?}: a path {why}", clip(path)))
}

fn check_headers(headers: &Pairs) -> Result<(), Inadmissible> {
    let mut seen = HashSet::new();
    for (name, value) in headers {
        let Some(parsed) = name_of(name) else {
            return invalid(ROUTES, format!("{:?} is no name of a header", clip(name)));
        };
        if TRAVEL_HEADERS.contains(&parsed.as_str()) {
            let why = format!("{name} says how a request travels and can't be put in");
            return invalid(ROUTES, why);
        }
        if !is_value(value) {
            return invalid(ROUTES, format!("the value of {name} can't stand in a header"));
        }
        if !seen.insert(parsed) {
            return invalid(ROUTES, format!("{name} is there twice"));
        }
    }
    Ok(())
}

/// All that a route puts in.
fn values(route: &Route) -> impl Iterator<Item = &String> {
    let Route { hosts: _, methods: _, paths: _, headers, body, query } = route;
    headers.values().chain(body.values()).chain(query.values())
}

/// The secrets that a route puts in. Those that can't be read it was refused for.
pub(crate) fn secrets_of(route: &Route) -> Vec<SecretName> {
    values(route).filter_map(|text| secrets_in(text).ok()).flatten().collect()
}

/// The secrets that stand in a value, or what is wrong with it.
fn secrets_in(text: &str) -> Result<Vec<SecretName>, String> {
    let mut names = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(OPENING) {
        let Some((inside, after)) = after.split_once(CLOSING) else {
            return Err("{{ is not closed with }}".to_owned());
        };
        let Some(name) = inside.strip_prefix(FUNCTION) else {
            return Err(format!(
                "{{{{{}}}}} is not known; {{{{SECRET:name}}}} stands for a secret",
                clip(inside)
            ));
        };
        names.push(name.parse().map_err(|error| format!("{error}"))?);
        rest = after;
    }
    if rest.contains(CLOSING) {
        return Err("}} is not opened with {{".to_owned());
    }
    Ok(names)
}

/// The first of these hosts that a secret which is bound to `bound` may not be sent to, on whatever port.
pub(crate) fn unbound<'a>(
    hosts: &'a [HostPattern],
    bound: &[HostBinding],
) -> Option<&'a HostPattern> {
    hosts.iter().find(|host| !bound.iter().any(|binding| covers(binding.host(), host)))
}

/// Whether every host of `other` is one of `pattern`.
fn covers(pattern: &HostPattern, other: &HostPattern) -> bool {
    match other.exact() {
        Some(host) => pattern.matches(host),
        // All below a host that is below the other's are below the other's.
        None => {
            let shown = other.to_string();
            let above = shown.strip_prefix("*.").unwrap_or(&shown);
            pattern == other || (pattern.exact().is_none() && pattern.matches(above))
        }
    }
}

// === Limits ===

fn check_limits(limits: &NetworkLimits) -> Result<(), Inadmissible> {
    let NetworkLimits { bytes_per_sec, connections_per_sec, connections } = *limits;
    if bytes_per_sec.is_some_and(|bytes| !BYTES_PER_SEC.contains(&bytes)) {
        let (least, most) = (BYTES_PER_SEC.start(), BYTES_PER_SEC.end());
        let why = format!("bytes_per_sec must be from {least} to {most}");
        return invalid("network.limits", why);
    }
    for (name, limit) in
        [("connections_per_sec", connections_per_sec), ("connections", connections)]
    {
        if limit.is_some_and(|limit| !CONNECTIONS.contains(&limit)) {
            let why = format!("{name} must be from 1 to {}", CONNECTIONS.end());
            return invalid("network.limits", why);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::str::FromStr;

    use serde_json::{Value, json};

    use super::*;

    fn network(value: Value) -> Network {
        serde_json::from_value(value).unwrap()
    }

    fn refusal(value: Value) -> String {
        let shown = value.to_string();
        check(&network(value)).map_or_else(|e| e.to_string(), |()| panic!("{shown} is admitted"))
    }

    fn route(changes: Value) -> Value {
        let mut route =
            json!({"hosts": ["api.example.com"], "headers": {"x-key": "{{SECRET:KEY}}"}});
        for (key, value) in changes.as_object().unwrap() {
            route[key] = value.clone();
        }
        json!({"routes": [route]})
    }

    #[test]
    fn a_policy_that_uses_everything_is_admitted() {
        let policy = json!({
            "internet": false,
            "allow": ["api.example.com", "*.example.org", "GET,HEAD x.example/v1/", "192.0.2.0/24"],
            "deny": ["POST api.example.com/admin"],
            "routes": [{
                "hosts": ["api.example.com", "*.example.org"],
                "methods": ["POST"], "paths": ["/v1/"],
                "headers": {"Authorization": "Bearer {{SECRET:KEY}}", "x-plain": "yes"},
                "body": {"token": "{{SECRET:A}}:{{SECRET:B}}"},
                "query": {"key": "{{SECRET:KEY}}"},
            }],
            "secrets": ["KEY"],
            "gateway": "office",
            "limits": {"bytes_per_sec": 1_000_000, "connections_per_sec": 10, "connections": 100},
        });
        let policy = network(policy);
        check(&policy).unwrap();
        let names = secrets_of(&policy.routes[0]);
        assert_eq!(
            names.iter().map(SecretName::as_str).collect::<Vec<_>>(),
            ["KEY", "A", "B", "KEY"]
        );
    }

    #[test]
    fn lists_have_limits() {
        let many = |n: usize| (0..n).map(|n| format!("h{n}.example")).collect::<Vec<_>>();
        check(&network(json!({"allow": many(256)}))).unwrap();
        assert!(refusal(json!({"allow": many(257)})).contains("network.allow: has 257"));
        assert!(refusal(json!({"deny": many(257)})).contains("network.deny"));
        let routes: Vec<_> = (0..65).map(|_| route(json!({}))["routes"][0].clone()).collect();
        assert!(refusal(json!({"routes": routes})).contains("64 are allowed"));
        assert!(refusal(route(json!({"hosts": many(65)}))).contains("64 are allowed"));
        let long: Vec<_> = many(250).iter().map(|h| format!("{}.{h}", "x".repeat(60))).collect();
        assert!(refusal(json!({"allow": long})).contains("bytes as JSON"));
    }

    #[test]
    fn a_route_has_hosts_and_something_to_put_in() {
        assert!(refusal(route(json!({"hosts": []}))).contains("no hosts"));
        assert!(refusal(route(json!({"headers": {}}))).contains("puts nothing in"));
        check(&network(route(json!({"headers": {}, "query": {"k": "v"}})))).unwrap();
    }

    #[test]
    fn headers_that_say_how_a_request_travels_are_refused() {
        for name in ["Host", "content-length", "Connection", "Transfer-Encoding", "TE", "Upgrade"] {
            let why = refusal(route(json!({"headers": {name: "x"}})));
            assert!(why.contains("travels"), "{why}");
        }
        for (headers, why) in [
            (json!({"a b": "x"}), "no name of a header"),
            (json!({"": "x"}), "no name of a header"),
            (json!({"x": "a\r\nb: c"}), "can't stand in a header"),
            (json!({"X-A": "1", "x-a": "2"}), "twice"),
        ] {
            let told = refusal(route(json!({"headers": headers})));
            assert!(told.contains(why), "{told}");
        }
        assert!(refusal(route(json!({"query": {"": "x"}}))).contains("no name of a field"));
    }

    #[test]
    fn a_template_that_means_nothing_is_refused_with_the_reason() {
        for (text, why) in [
            ("Bearer {{SECRET:KEY", "not closed"),
            ("Bearer {{SECRET:KEY}", "not closed"),
            ("Bearer SECRET:KEY}}", "not opened"),
            ("Bearer {{ENV:KEY}}", "not known"),
            ("Bearer {{secret:KEY}}", "not known"),
            ("Bearer {{KEY}}", "not known"),
            ("Bearer {{SECRET:}}", ""),
            ("Bearer {{SECRET:a b}}", ""),
        ] {
            for place in ["headers", "body", "query"] {
                let told = refusal(route(json!({place: {"x": text}})));
                assert!(told.starts_with("network.routes: ") && told.contains(why), "{told}");
            }
        }
    }

    #[test]
    fn methods_and_paths_of_a_route_are_sane() {
        for method in ["", "get", "GET POST", "G=T", &"X".repeat(33)] {
            assert!(refusal(route(json!({"methods": [method]}))).contains("method"), "{method}");
        }
        for path in ["", "v1", "/a?b", "/a/../b", "/%2e", "/a*", &format!("/{}", "x".repeat(1024))]
        {
            assert!(refusal(route(json!({"paths": [path]}))).contains("a path"), "{path}");
        }
    }

    #[test]
    fn limits_that_stop_everything_or_nothing_are_refused() {
        for (name, value) in [
            ("bytes_per_sec", 0_u64),
            ("bytes_per_sec", 1023),
            ("bytes_per_sec", u64::MAX),
            ("connections_per_sec", 0),
            ("connections", 0),
            ("connections", 1_000_001),
        ] {
            assert!(refusal(json!({"limits": {name: value}})).contains(name), "{name} {value}");
        }
    }

    #[test]
    fn a_secret_goes_to_a_route_all_of_whose_hosts_it_is_bound_to() {
        fn parsed<T: FromStr<Err: Debug>>(texts: &[&str]) -> Vec<T> {
            texts.iter().map(|text| text.parse().unwrap()).collect()
        }
        for (hosts, bound, missed) in [
            (&["a.x.org"][..], &["a.x.org"][..], None),
            (&["a.x.org", "b.x.org"], &["*.x.org"], None),
            (&["*.x.org"], &["*.x.org"], None),
            (&["*.a.x.org"], &["*.x.org"], None),
            (&["*.x.org"], &["*.a.x.org"], Some("*.x.org")),
            (&["*.x.org"], &["a.x.org"], Some("*.x.org")),
            (&["x.org"], &["*.x.org"], Some("x.org")),
            (&["*.x.org"], &["x.org"], Some("*.x.org")),
            (&["a.x.org", "y.org"], &["*.x.org"], Some("y.org")),
            (&["a.x.org"], &["http://*.x.org:8080"], None),
            (&["*.badx.org"], &["*.x.org"], Some("*.badx.org")),
        ] {
            let (hosts, bound) = (parsed(hosts), parsed(bound));
            let told = unbound(&hosts, &bound).map(ToString::to_string);
            assert_eq!(told.as_deref(), missed, "{hosts:?} {bound:?}");
        }
    }
}
