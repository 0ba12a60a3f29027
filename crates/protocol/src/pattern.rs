//! Patterns of COPY and `.dockerignore`: `*` and `?` within a part of a path, `**` for any number of
//! parts. Sets like `[a-z]` are not understood and stand for themselves. The daemon heeds them; whoever sends
//! a build context need not send what it would not look at.

/// Whether a pattern means exactly this path. Both are relative, without `.` and `..`.
pub fn matches(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('/').collect();
    let path: Vec<&str> = path.split('/').collect();
    wild(&pattern, &path, |part| *part == "**", |pattern, part| part_matches(pattern, part))
}

/// Whether a text has anything to match in it.
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

fn part_matches(pattern: &str, part: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let part: Vec<char> = part.chars().collect();
    let one = |pattern: &char, letter: &char| *pattern == '?' || pattern == letter;
    wild(&pattern, &part, |letter| *letter == '*', one)
}

/// Whether `items` are what `pattern` says, where a star stands for any number of them. When the rest
/// does not fit, the last star takes one more: earlier ones need not be tried again, so whoever
/// writes the pattern can't make this slow.
fn wild<P, T>(
    pattern: &[P],
    items: &[T],
    star: impl Fn(&P) -> bool,
    fits: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut at, mut item) = (0, 0);
    let mut retry = None;
    while item < items.len() {
        if pattern.get(at).is_some_and(&star) {
            retry = Some((at + 1, item));
            at += 1;
        } else if pattern.get(at).is_some_and(|pattern| fits(pattern, &items[item])) {
            at += 1;
            item += 1;
        } else if let Some((after, from)) = retry {
            retry = Some((after, from + 1));
            at = after;
            item = from + 1;
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(star)
}

/// `.dockerignore`: one pattern a line, `#` for comments, `!` takes back, the last one that fits
/// decides. A pattern also means everything below what it fits.
#[derive(Debug, Default)]
pub struct Ignore {
    rules: Vec<Rule>,
}

#[derive(Debug)]
struct Rule {
    pattern: String,
    keeps: bool,
}

impl Ignore {
    /// What a file of this content says.
    pub fn parse(text: &str) -> Self {
        let lines = text.trim_start_matches('\u{feff}').lines().map(str::trim);
        let rule = |line: &str| {
            let (keeps, pattern) = match line.strip_prefix('!') {
                Some(pattern) => (true, pattern.trim()),
                None => (false, line),
            };
            let parts = pattern.split('/').filter(|part| !part.is_empty() && *part != ".");
            let pattern = parts.collect::<Vec<_>>().join("/");
            (!pattern.is_empty()).then_some(Rule { pattern, keeps })
        };
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        Self { rules: lines.filter_map(rule).collect() }
    }

    /// Whether something below what is ignored may be kept.
    pub fn takes_back(&self) -> bool {
        self.rules.iter().any(|rule| rule.keeps)
    }

    /// Whether a path, relative and without `.` and `..`, is left out.
    pub fn ignores(&self, path: &str) -> bool {
        let fits = |rule: &&Rule| {
            let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
            ends.into_iter().any(|end| matches(&rule.pattern, &path[..end]))
        };
        self.rules.iter().rev().find(fits).is_some_and(|rule| !rule.keeps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stay_within_a_part_and_double_stars_do_not() {
        for (pattern, path) in [
            ("*.rs", "main.rs"),
            ("s?c/*.rs", "src/main.rs"),
            ("**/*.rs", "main.rs"),
            ("**/*.rs", "a/b/main.rs"),
            ("a/**", "a/b/c"),
            ("a/**/c", "a/c"),
            ("*a*b*", "xxaxxbxx"),
            ("[ab]", "[ab]"),
        ] {
            assert!(matches(pattern, path), "{pattern} should match {path}");
        }
        for (pattern, path) in
            [("*.rs", "src/main.rs"), ("?", ""), ("a/*", "a/b/c"), ("a", "ab"), ("a/**/c", "a/b")]
        {
            assert!(!matches(pattern, path), "{pattern} should not match {path}");
        }
    }

    #[test]
    fn a_malicious_pattern_takes_no_time() {
        let pattern = "*a".repeat(1000);
        let path = "a".repeat(5000) + "b";
        assert!(!matches(&pattern, &path));
        assert!(!matches(&(vec!["**"; 1000].join("/a/") + "/b"), &vec!["a"; 2000].join("/")));
    }

    #[test]
    fn the_last_rule_that_fits_decides() {
        let ignore =
            Ignore::parse("# comment\n\n/target/\nnode_modules\n*.log\n!keep.log\n**/tmp\n");
        for path in ["target", "target/debug/x", "node_modules/a", "x.log", "a/b/tmp", "tmp/x"] {
            assert!(ignore.ignores(path), "{path}");
        }
        for path in ["src", "keep.log", "a/node_modules", "a/x.log", "targets", "a/target"] {
            assert!(!ignore.ignores(path), "{path}");
        }
    }

    #[test]
    fn everything_but_something_can_be_said() {
        let ignore = Ignore::parse("*\n!src\n!src/**\nsrc/*.tmp");
        assert!(ignore.ignores("README") && ignore.ignores("a/b") && ignore.ignores("src/x.tmp"));
        assert!(!ignore.ignores("src") && !ignore.ignores("src/a/b"));
    }
}
