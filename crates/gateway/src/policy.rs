//! What a client may call: its rules, understood once.
//!
//! Decided on the body of a call, whatever the headers say and whether the tool was listed or not.

use std::time::Duration;

use jsonschema::Validator;
use regex::{Regex, RegexBuilder};
use serde_json::Value;
use torpor_protocol::mcp_gateway::{McpClientPolicy, McpRule};
use torpor_service::{Error, Result};

/// Rules of one client, and patterns of one rule.
const RULES_MAX: usize = 256;
const PATTERNS_MAX: usize = 64;
/// What a compiled pattern may take.
const PATTERN_BYTES: usize = 1 << 20;
/// Bytes of arguments and of a result, unless a rule says something else; and the most that it can say.
const ARGUMENTS: usize = 256 * 1024;
const RESULT: usize = 1 << 20;
/// The most that is read of any upstream's answer.
pub(crate) const RESULT_MAX: usize = 16 << 20;
/// How long a call may take, unless a rule says something else: clients give up after a minute.
const TIMEOUT: Duration = Duration::from_secs(50);
const TIMEOUT_MAX: Duration = Duration::from_secs(600);

/// A client's rules.
#[derive(Debug)]
pub(crate) struct Policy {
    rules: Vec<Rule>,
    pub(crate) search: bool,
    pub(crate) revision: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Rule {
    server: String,
    tool: String,
    deny: bool,
    arguments: Option<Validator>,
    deny_patterns: Vec<Regex>,
    pub(crate) calls_per_minute: Option<u32>,
    pub(crate) arguments_max: usize,
    pub(crate) result_max: usize,
    pub(crate) timeout: Duration,
}

impl Policy {
    /// Refuses what makes no sense, in words for who wrote it.
    pub(crate) fn compile(policy: &McpClientPolicy, revision: u64) -> Result<Self> {
        if policy.rules.len() > RULES_MAX {
            return Err(Error::invalid(format!("a policy has at most {RULES_MAX} rules")));
        }
        let rules = policy.rules.iter().enumerate();
        let rules = rules.map(|(at, rule)| {
            Rule::compile(rule).map_err(|why| Error::invalid(format!("rules[{at}]: {why}")))
        });
        Ok(Self {
            rules: rules.collect::<Result<_>>()?,
            search: policy.search,
            revision: Some(revision),
        })
    }

    /// For who has none: everything, or nothing.
    pub(crate) fn default_of(open: bool) -> Self {
        let everything = || Rule::compile(&McpRule::default()).ok();
        let rules = if open { everything().into_iter().collect() } else { Vec::new() };
        Self { rules, search: false, revision: None }
    }

    /// The rule that lets this tool be called; none: it is not there for this client.
    pub(crate) fn rule(&self, server: &str, tool: &str) -> Option<(usize, &Rule)> {
        let matching = |rule: &Rule| glob(&rule.server, server) && glob(&rule.tool, tool);
        let at = self.rules.iter().position(matching)?;
        self.rules.get(at).filter(|rule| !rule.deny).map(|rule| (at, rule))
    }
}

impl Rule {
    fn compile(rule: &McpRule) -> std::result::Result<Self, String> {
        if rule.deny_patterns.len() > PATTERNS_MAX {
            return Err(format!("deny_patterns has at most {PATTERNS_MAX} entries"));
        }
        if rule.calls_per_minute == Some(0) {
            return Err("calls_per_minute is at least 1; use deny to allow none".to_owned());
        }
        let pattern = |text: &String| {
            let built = RegexBuilder::new(text).size_limit(PATTERN_BYTES).build();
            built.map_err(|error| format!("deny_patterns: {error}"))
        };
        let schema = |schema: &Value| {
            jsonschema::options().build(schema).map_err(|error| format!("arguments: {error}"))
        };
        let timeout = rule.timeout_ms.map_or(TIMEOUT, Duration::from_millis);
        Ok(Self {
            server: rule.server.clone(),
            tool: rule.tool.clone(),
            deny: rule.deny,
            arguments: rule.arguments.as_ref().map(schema).transpose()?,
            deny_patterns: rule
                .deny_patterns
                .iter()
                .map(pattern)
                .collect::<std::result::Result<_, _>>()?,
            calls_per_minute: rule.calls_per_minute,
            arguments_max: rule.arguments_max_bytes.unwrap_or(ARGUMENTS).min(RESULT_MAX),
            result_max: rule.result_max_bytes.unwrap_or(RESULT).min(RESULT_MAX),
            timeout: timeout.clamp(Duration::from_millis(1), TIMEOUT_MAX),
        })
    }

    /// Why these arguments are refused. No value of them is in the text.
    pub(crate) fn refuses(&self, arguments: &Value) -> Option<String> {
        if let Some(schema) = &self.arguments
            && let Err(error) = schema.validate(arguments)
        {
            return Some(format!(
                "the arguments do not fit the rule at `{}` (schema {})",
                error.instance_path(),
                error.schema_path()
            ));
        }
        let hit = self.deny_patterns.iter().find(|pattern| any_text(arguments, pattern))?;
        Some(format!("a text in the arguments matches the denied pattern `{hit}`"))
    }
}

fn any_text(value: &Value, pattern: &Regex) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => pattern.is_match(text),
        Value::Array(values) => values.iter().any(|value| any_text(value, pattern)),
        Value::Object(fields) => {
            fields.iter().any(|(name, value)| pattern.is_match(name) || any_text(value, pattern))
        }
    }
}

/// Whether a text fits a pattern in which `*` stands for anything.
pub(crate) fn glob(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<_> = parts.collect();
    let Some(last) = parts.pop() else { return rest.is_empty() };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn policy(rules: Value) -> Result<Policy> {
        let policy = serde_json::from_value(json!({ "rules": rules })).unwrap();
        Policy::compile(&policy, 7)
    }

    #[test]
    fn the_first_rule_that_matches_decides_and_without_one_nothing_is_there() {
        let policy = policy(json!([
            {"server": "git", "tool": "*delete*", "deny": true},
            {"server": "git"},
            {"server": "m*", "tool": "read_*"},
        ]))
        .unwrap();
        let may = |server: &str, tool: &str| policy.rule(server, tool).is_some();
        assert!(may("git", "log") && may("mail", "read_all"));
        assert!(!may("git", "branch_delete") && !may("mail", "send") && !may("other", "read_x"));
        assert!(Policy::default_of(true).rule("any", "thing").is_some());
        assert!(Policy::default_of(false).rule("any", "thing").is_none());
    }

    #[test]
    fn arguments_must_fit_and_nothing_in_them_may_match() {
        let policy = policy(json!([{
            "arguments": {"properties": {"path": {"type": "string", "pattern": "^/srv/"}}},
            "deny_patterns": ["(?i)begin .*private key"],
        }]))
        .unwrap();
        let (_, rule) = policy.rule("a", "b").unwrap();
        assert_eq!(rule.refuses(&json!({"path": "/srv/a"})), None);
        let why = rule.refuses(&json!({"path": "/etc/shadow"})).unwrap();
        assert!(why.contains("/path") && !why.contains("shadow"), "{why}");
        let why = rule.refuses(&json!({"a": [{"b": "-----BEGIN RSA PRIVATE KEY"}]})).unwrap();
        assert!(why.contains("private key") && !why.contains("RSA"), "{why}");
    }

    #[test]
    fn a_rule_that_makes_no_sense_is_refused_by_its_place() {
        for (rule, why) in [
            (json!({"deny_patterns": ["("]}), "rules[0]: deny_patterns"),
            (json!({"arguments": {"type": "nothing"}}), "rules[0]: arguments"),
            (json!({"calls_per_minute": 0}), "calls_per_minute"),
        ] {
            let error = policy(json!([rule])).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text) in
            [("*", ""), ("a*c", "abbc"), ("*b*", "abc"), ("abc", "abc"), ("a*b*c", "a1b2c")]
        {
            assert!(glob(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a", "ab"), ("a*c", "ab"), ("ab*ba", "aba"), ("", "a")] {
            assert!(!glob(pattern, text), "{pattern} {text}");
        }
    }
}
