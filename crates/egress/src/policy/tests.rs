//! What policies decide.

use torpor_protocol::Network;

use super::*;

const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

fn policy(text: &str) -> Policy {
    opened(text, &[])
}

fn opened(text: &str, private: &[&str]) -> Policy {
    let private: Vec<AddressRange> = private.iter().map(|range| range.parse().unwrap()).collect();
    Policy::new(&serde_json::from_str::<Network>(text).unwrap(), &private)
}

fn pass(rule: &str, to: Goal) -> ConnectionDecision {
    ConnectionDecision::Pass { rule: rule.to_owned(), to }
}

fn intercept(rule: &str) -> ConnectionDecision {
    ConnectionDecision::Intercept { rule: rule.to_owned() }
}

fn deny(rule: &str) -> ConnectionDecision {
    ConnectionDecision::Deny { rule: rule.to_owned() }
}

#[test]
fn deny_wins_over_allow() {
    let policy = policy(r#"{"allow":["*.a.test"],"deny":["bad.a.test","198.51.100.0/24"]}"#);
    assert_eq!(policy.connection("good.a.test", PUBLIC), pass("*.a.test", Goal::Host));
    assert_eq!(policy.connection("bad.a.test", PUBLIC), deny("bad.a.test"));
    let denied = Ipv4Addr::new(198, 51, 100, 1);
    assert_eq!(policy.connection("good.a.test", denied), deny("198.51.100.0/24"));
    assert_eq!(policy.address(Some("good.a.test"), denied), Err("198.51.100.0/24".to_owned()));
    assert!(!policy.question("bad.a.test").allowed);
}

#[test]
fn what_is_listed_is_all_that_is_allowed_whatever_internet_says() {
    for internet in [true, false] {
        let policy = policy(&format!(r#"{{"internet":{internet},"allow":["a.test"]}}"#));
        assert_eq!(policy.connection("a.test", PUBLIC), pass("a.test", Goal::Host));
        assert_eq!(policy.connection("b.test", PUBLIC), deny(word::NOT_ALLOWED));
        assert!(policy.question("a.test").allowed);
        assert!(!policy.question("secret-data.b.test").allowed);
    }
}

#[test]
fn without_internet_and_list_nothing_is_reached() {
    let policy = policy(r#"{"internet":false,"deny":["a.test"]}"#);
    assert_eq!(policy.connection("b.test", PUBLIC), deny(word::INTERNET));
    assert_eq!(policy.nameless(&[], PUBLIC).0, deny(word::INTERNET));
    assert!(!policy.question("b.test").allowed);
    assert!(!policy.request("GET", "b.test", "/", PUBLIC).allowed);
}

#[test]
fn what_is_private_needs_a_range_of_its_own_that_the_operator_opened() {
    let inside = Ipv4Addr::new(10, 1, 2, 3);
    let wide = opened(r#"{"allow":["0.0.0.0/0","8.0.0.0/5","a.test"]}"#, &["0.0.0.0/0"]);
    assert_eq!(wide.connection("a.test", inside), deny(word::PRIVATE));
    assert_eq!(wide.address(Some("a.test"), METADATA), Err(word::PRIVATE.to_owned()));
    let text = r#"{"allow":["10.1.0.0/16","a.test"]}"#;
    assert_eq!(policy(text).nameless(&[], inside).0, deny(word::PRIVATE));
    let open = opened(text, &["10.0.0.0/8"]);
    assert_eq!(open.nameless(&[], inside).0, pass("10.1.0.0/16", Goal::Address));
    assert_eq!(open.address(Some("a.test"), inside), Ok(Reach::Private));
    assert!(open.may_tell(inside));
    assert!(!open.may_tell(Ipv4Addr::new(10, 2, 0, 1)));
}

#[test]
fn every_closed_address_is_private_to_an_open_policy() {
    let policy = policy("{}");
    for address in [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "168.63.129.16",
        "169.254.169.254",
        "172.31.255.255",
        "192.0.0.192",
        "192.168.1.1",
        "198.19.0.1",
        "224.0.0.251",
        "255.255.255.255",
    ] {
        let address = address.parse().unwrap();
        assert_eq!(policy.connection("a.test", address), deny(word::PRIVATE), "{address}");
        assert_eq!(policy.address(Some("a.test"), address), Err(word::PRIVATE.to_owned()));
        assert!(!policy.may_tell(address));
    }
    assert_eq!(policy.address(None, PUBLIC), Ok(Reach::Public));
}

#[test]
fn a_rule_about_requests_makes_a_connection_be_intercepted() {
    let policy = policy(r#"{"allow":["GET a.test","b.test"],"deny":["b.test/admin"]}"#);
    assert_eq!(policy.connection("a.test", PUBLIC), intercept("GET a.test"));
    assert_eq!(policy.connection("b.test", PUBLIC), intercept("b.test/admin"));
    assert!(policy.request("get", "A.test:443", "/x", PUBLIC).allowed);
    assert!(!policy.request("POST", "a.test", "/x", PUBLIC).allowed);
    assert!(policy.request("GET", "b.test", "/administration", PUBLIC).allowed);
    let denied = policy.request("GET", "b.test", "/x/..//%61dmin", PUBLIC);
    assert_eq!((denied.allowed, denied.rule.as_str()), (false, "b.test/admin"));
    assert_eq!(denied.path.as_deref(), Some("/admin"));
}

#[test]
fn a_wide_rule_makes_a_narrow_one_for_the_same_host_needless() {
    let policy = policy(r#"{"allow":["GET a.test/x","*.test"]}"#);
    assert_eq!(policy.connection("a.test", PUBLIC), pass("*.test", Goal::Host));
}

#[test]
fn a_path_that_can_be_read_in_two_ways_is_decided_against_where_paths_matter() {
    let policy = policy(r#"{"allow":["a.test/v1","b.test"]}"#);
    for path in
        ["/v1/%2e%2e%2fadmin", "/v1%5cx", "/v1/%00", "/v1/%25", "/v1/%zz", "/v1;x", "/v1\\x"]
    {
        let decision = policy.request("GET", "a.test", path, PUBLIC);
        assert_eq!((decision.allowed, decision.rule.as_str()), (false, word::PATH), "{path}");
        assert!(policy.request("GET", "b.test", path, PUBLIC).allowed, "{path}");
    }
}

#[test]
fn a_prefix_ends_where_a_segment_does() {
    let policy = policy(r#"{"allow":["a.test/v1","b.test/v1/"]}"#);
    for (host, path, allowed) in [
        ("a.test", "/v1", true),
        ("a.test", "/v1/", true),
        ("a.test", "/v1/x", true),
        ("a.test", "/v10", false),
        ("a.test", "/v1/../v2", false),
        ("a.test", "/v2/../v1/x", true),
        ("a.test", "/V1", false),
        ("b.test", "/v1/x", true),
        ("b.test", "/v1", false),
    ] {
        assert_eq!(policy.request("GET", host, path, PUBLIC).allowed, allowed, "{host}{path}");
    }
}

#[test]
fn paths_have_one_form() {
    for (path, form) in [
        ("/", Some("/")),
        ("*", Some("/")),
        ("//a///b", Some("/a/b")),
        ("/a/./b/../c", Some("/a/c")),
        ("/../../a", Some("/a")),
        ("/a/..", Some("/")),
        ("/a/b/..", Some("/a/")),
        ("/%7Eann/%e2%82%ac", Some("/~ann/%E2%82%AC")),
        ("/%2e%2E/a", Some("/a")),
        ("a", None),
        ("", None),
        ("/€", None),
        ("/%", None),
        ("/%+1", None),
    ] {
        assert_eq!(canonical(path).as_deref(), form, "{path}");
    }
}

#[test]
fn hosts_have_one_form_and_addresses_are_none() {
    for (text, host) in [
        ("A.Example.COM.", Some("a.example.com")),
        ("a.test:8080", Some("a.test")),
        ("localhost", Some("localhost")),
        ("203.0.113.7", None),
        ("203.0.113.7:80", None),
        ("2130706433", None),
        ("0x7f.0x1", None),
        ("[::1]:80", None),
        ("a..b", None),
        ("a b", None),
        ("a@b", None),
        ("a.test:x", None),
        ("", None),
    ] {
        assert_eq!(host_of(text).as_deref(), host, "{text}");
    }
}

#[test]
fn what_says_no_host_is_attributed_by_the_names_it_was_answered() {
    let policy = policy(r#"{"allow":["a.test","GET r.test"],"deny":["bad.test"]}"#);
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let (decision, host) = policy.nameless(&names(&["b.test", "a.test"]), PUBLIC);
    assert_eq!((decision, host.as_deref()), (pass("a.test", Goal::Host), Some("a.test")));
    assert_eq!(policy.nameless(&names(&["a.test", "bad.test"]), PUBLIC).0, deny("bad.test"));
    assert_eq!(policy.nameless(&names(&["r.test"]), PUBLIC).0, intercept("GET r.test"));
    assert_eq!(policy.nameless(&[], PUBLIC).0, deny(word::NO_HOST));
}

#[test]
fn where_hosts_dont_matter_an_address_is_enough() {
    let policy = policy(r#"{"gateway":"office"}"#);
    assert_eq!(policy.nameless(&[], PUBLIC).0, pass(word::INTERNET, Goal::Address));
    assert_eq!(policy.nameless(&[], METADATA).0, deny(word::PRIVATE));
}

#[test]
fn a_range_allows_an_address_and_no_host_that_is_elsewhere() {
    let policy = policy(r#"{"allow":["203.0.113.0/24","a.test"]}"#);
    assert_eq!(policy.connection("x.test", PUBLIC), pass("203.0.113.0/24", Goal::Address));
    let elsewhere = Ipv4Addr::new(198, 51, 100, 1);
    assert_eq!(policy.connection("x.test", elsewhere), deny(word::NOT_ALLOWED));
    assert!(policy.request("GET", "x.test", "/", PUBLIC).allowed);
    assert_eq!(policy.address(Some("x.test"), elsewhere), Err(word::NOT_ALLOWED.to_owned()));
    assert_eq!(policy.address(Some("a.test"), elsewhere), Ok(Reach::Public));
    assert!(!policy.question("x.test").allowed);
}
