//! House rules as tests: who may depend on whom, purpose at the top of every file, sizes, words.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Files that git would know, with these endings.
fn sources(endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap().flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() && !["target", ".git", "node_modules"].contains(&name.as_str()) {
                open.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path);
            }
        }
    }
    assert!(found.len() > 20, "the sources were found");
    found
}

/// Every crate, and those of ours that it may use.
fn allowed() -> Vec<(&'static str, Vec<&'static str>)> {
    vec![
        ("protocol", vec![]),
        ("agent", vec!["protocol"]),
        ("lifecycle", vec!["agent", "protocol"]),
        ("disk", vec![]),
        ("ext4", vec![]),
        ("files", vec!["protocol"]),
        ("init", vec![]),
        ("kernel", vec![]),
        ("qemu", vec![]),
        ("engines", vec!["disk", "ext4", "kernel", "lifecycle", "protocol", "qemu"]),
        ("store", vec!["lifecycle", "protocol"]),
        ("volumes", vec!["disk", "files", "lifecycle", "protocol"]),
        ("headers", vec![]),
        ("proxy", vec!["headers", "lifecycle", "protocol"]),
        ("egress", vec!["headers", "lifecycle", "protocol"]),
        ("registry", vec![]),
        (
            "service",
            vec!["egress", "files", "lifecycle", "protocol", "registry", "store", "volumes"],
        ),
        ("web", vec!["protocol", "service"]),
        ("dialects", vec!["protocol", "service", "web"]),
        ("mcp", vec!["protocol", "service", "web"]),
        ("edge", vec!["lifecycle", "protocol", "proxy", "service", "store", "web"]),
        (
            "daemon",
            vec![
                "edge",
                "egress",
                "engines",
                "gateway",
                "kernel",
                "lifecycle",
                "protocol",
                "proxy",
                "qemu",
                "service",
                "store",
                "volumes",
                "web",
            ],
        ),
        ("gateway", vec!["egress", "lifecycle", "protocol", "service", "store"]),
        ("client", vec!["protocol"]),
        ("bench", vec!["client", "lifecycle", "protocol", "store"]),
        (
            "cli",
            vec![
                "bench", "client", "daemon", "dialects", "engines", "kernel", "mcp", "protocol",
                "store",
            ],
        ),
    ]
}

#[test]
fn crates_depend_only_on_what_the_architecture_allows() {
    for (name, allowed) in allowed() {
        let manifest =
            fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap();
        // Tests may use what they like.
        let used: BTreeSet<_> = manifest
            .split("\n[")
            .filter(|section| !section.starts_with("dev-dependencies]"))
            .flat_map(str::lines)
            .filter_map(|line| line.strip_prefix("torpor-"))
            .filter_map(|line| line.split(['.', ' ', '=']).next())
            .collect();
        let allowed: BTreeSet<_> = allowed.into_iter().collect();
        let extra: Vec<_> = used.difference(&allowed).collect();
        assert!(extra.is_empty(), "{name} uses {extra:?}; ARCHITECTURE.md says it may not");
    }
}

#[test]
fn the_service_knows_no_http() {
    let service = root().join("crates/service");
    let manifest = fs::read_to_string(service.join("Cargo.toml")).unwrap();
    let sources: Vec<_> = sources(&[".rs"])
        .into_iter()
        .filter(|path| path.starts_with(service.join("src")))
        .map(|path| (fs::read_to_string(&path).unwrap(), path))
        .collect();
    assert!(sources.len() > 5, "the service was found");
    for library in ["axum", "http", "http-body-util", "hyper", "hyper-util", "tower"] {
        let dependency = format!("{library}.workspace");
        assert!(!manifest.lines().any(|line| line.starts_with(&dependency)), "{library} is used");
        let path = format!("{}::", library.replace('-', "_"));
        for (text, file) in &sources {
            let used = text
                .match_indices(&path)
                .any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'));
            assert!(!used, "{} uses {library}", file.display());
        }
    }
    for (text, file) in &sources {
        assert!(!text.contains("StatusCode"), "{} knows a status of HTTP", file.display());
    }
}

#[test]
fn every_file_says_what_it_is_and_fits() {
    for path in sources(&[".rs"]) {
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("//!"), "{} does not say what it is", path.display());
        let lines = text.lines().count();
        assert!(lines <= 500, "{} has {lines} lines; two files would be clearer", path.display());
    }
}

#[test]
fn no_file_is_named_after_nothing() {
    for path in sources(&[".rs"]) {
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let vague = ["utils", "util", "common", "helpers", "helper", "misc", "manager", "types"];
        assert!(!vague.contains(&stem.as_str()), "{} is no noun of ours", path.display());
    }
}

#[test]
fn every_fuzz_target_is_built_has_seeds_and_is_replayed() {
    let names = |dir: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(root().join("fuzz").join(dir)).unwrap().flatten();
        entries.map(|entry| entry.path().file_stem().unwrap().display().to_string()).collect()
    };
    let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
    let tests: String = sources(&[".rs"])
        .iter()
        .filter(|path| path.ends_with("fuzzing.rs"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let targets = names("fuzz_targets");
    assert_eq!(targets, names("seeds"), "targets, and who has seeds");
    for target in targets {
        assert!(manifest.contains(&format!("name = \"{target}\"")), "{target} is not built");
        assert!(tests.contains(&format!("replay(\"{target}\"")), "{target} is not replayed");
    }
}

#[test]
fn nothing_is_left_unfinished() {
    let unfinished =
        [concat!("todo", "!("), concat!("unimplemented", "!("), concat!("#[ign", "ore")];
    for path in sources(&[".rs"]) {
        let text = fs::read_to_string(&path).unwrap();
        for word in unfinished {
            assert!(!text.contains(word), "{} has {word}", path.display());
        }
    }
}

#[test]
fn every_error_code_is_documented() {
    let api = fs::read_to_string(root().join("docs/guide/api.md")).unwrap();
    let protocol = fs::read_to_string(root().join("crates/protocol/src/error.rs")).unwrap();
    let codes = protocol.lines().filter_map(|line| Some(line.trim().split_once(" = ")?.0));
    let codes: BTreeSet<_> = codes.filter(|code| code.chars().all(char::is_alphanumeric)).collect();
    assert!(codes.len() > 15, "{codes:?}");
    for code in codes {
        let snake: String = code
            .chars()
            .enumerate()
            .flat_map(|(n, c)| {
                let gap = (n > 0 && c.is_uppercase()).then_some('_');
                gap.into_iter().chain(c.to_lowercase())
            })
            .collect();
        assert!(api.contains(&format!("`{snake}`")), "docs/guide/api.md does not explain {snake}");
    }
}

#[test]
fn every_promise_names_what_shows_it() {
    let text = fs::read_to_string(root().join("SPECIFICATION.md")).unwrap();
    let tests: String =
        sources(&[".rs", ".py"]).iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut promises = 0;
    for row in text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| promise"))
    {
        let shown = row.trim_end_matches('|').rsplit('|').next().unwrap().trim();
        for name in shown.split('`').skip(1).step_by(2) {
            promises += 1;
            let known = ["torpor bench", "cargo bench"].iter().any(|word| name.starts_with(word))
                || ["fn", "def"].iter().any(|word| tests.contains(&format!("{word} {name}(")));
            assert!(known, "SPECIFICATION.md names {name}, which does not exist");
        }
    }
    assert!(promises > 10, "the promises were found");
}
