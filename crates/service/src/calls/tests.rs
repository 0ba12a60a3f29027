//! Names of forks.

use super::*;

fn try_names(count: usize, name: Option<&str>) -> Result<Vec<String>> {
    let fork = Fork { count, name: name.map(str::to_owned), ..Fork::default() };
    let names = names(&fork)?;
    Ok(names.into_iter().map(|name| name.map_or_else(String::new, |n| n.to_string())).collect())
}

#[test]
fn forks_are_numbered_from_one() {
    assert_eq!(try_names(3, Some("agent-{n}")).unwrap(), ["agent-1", "agent-2", "agent-3"]);
    assert_eq!(try_names(1, Some("agent")).unwrap(), ["agent"]);
    assert_eq!(try_names(2, None).unwrap(), ["", ""]);
}

#[test]
fn a_wrong_number_or_name_is_refused_before_anything_begins() {
    for (count, name) in [
        (0, None),
        (FORKS_MAX + 1, None),
        (10_000, None),
        (2, Some("agent")),
        (2, Some("{n}")),
        (2, Some("Agent-{n}")),
        (1, Some("../../etc")),
        (1000, Some(&*format!("{}{{n}}", "a".repeat(60)))),
    ] {
        assert!(try_names(count, name).is_err(), "{count} {name:?}");
    }
}
