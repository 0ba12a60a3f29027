//! Events for people: one line each.

use torpor_protocol::egress::{EgressEvent, Verdict};

use crate::output::plain;
use crate::units;

/// When, what, the verdict and why. Nothing in it can act on a terminal: hosts and paths are what code
/// in a sandbox made of them.
pub(super) fn line(event: &EgressEvent, whose: bool) -> String {
    let when = units::show_stamp(event.at_ms.saturating_mul(1000));
    let whose = if whose { format!(" {}", event.sandbox) } else { String::new() };
    let mut text = format!(
        "{when}{whose} {:7} {:5} {} ({})",
        verdict(event.verdict),
        event.what.as_str(),
        goal(event),
        event.rule
    );
    if !event.secrets.is_empty() {
        let names: Vec<_> = event.secrets.iter().map(|name| name.as_str()).collect();
        text.push_str(&format!(" with {}", names.join(", ")));
    }
    if let Some(gateway) = &event.gateway {
        text.push_str(&format!(" through {gateway}"));
    }
    let mut text = plain(&text);
    text.push('\n');
    text
}

/// `GET api.example.com:443/v1`, `192.0.2.7:53`.
fn goal(event: &EgressEvent) -> String {
    let mut goal = String::new();
    if let Some(method) = &event.method {
        goal.push_str(method);
        goal.push(' ');
    }
    match (&event.host, event.address) {
        (Some(host), _) => goal.push_str(host),
        (None, Some(address)) => goal.push_str(&address.to_string()),
        (None, None) => goal.push('-'),
    }
    if let Some(port) = event.port {
        goal.push_str(&format!(":{port}"));
    }
    goal.push_str(event.path.as_deref().unwrap_or_default());
    goal
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Allowed => "allowed",
        Verdict::Denied => "denied",
        Verdict::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn event(changes: serde_json::Value) -> EgressEvent {
        let mut event = json!({
            "at": "2027-01-15T08:00:00.250Z", "sandbox": "0".repeat(21), "what": "tls",
            "verdict": "denied", "rule": "allow",
        });
        event.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        serde_json::from_value(event).unwrap()
    }

    #[test]
    fn a_line_says_what_was_decided_and_why() {
        let request = event(json!({
            "what": "http", "verdict": "allowed", "rule": "api.example.com", "method": "POST",
            "host": "api.example.com", "address": "192.0.2.7", "port": 443, "path": "/v1/x",
            "secrets": ["KEY"], "gateway": "office",
        }));
        assert_eq!(
            line(&request, false),
            "2027-01-15T08:00:00.250Z allowed http  POST api.example.com:443/v1/x \
             (api.example.com) with KEY through office\n"
        );
        let packet = event(json!({"what": "udp", "address": "192.0.2.7", "port": 53}));
        assert!(line(&packet, false).ends_with(" denied  udp   192.0.2.7:53 (allow)\n"));
        assert!(line(&packet, true).contains(&"0".repeat(21)));
    }

    #[test]
    fn a_hostile_path_does_not_reach_the_terminal() {
        let shown = line(&event(json!({"path": "/\u{1b}[2J\nfake"})), false);
        assert!(!shown.contains('\u{1b}'));
        assert_eq!(shown.matches('\n').count(), 1);
    }
}
