//! Packages that a command fetches: by an exact version, or what is approved is not what runs tomorrow. A name
//! alone is also what a squatter waits for.
//!
//! It is a help and no wall: what a command fetches in other ways, its egress policy allows or not.

/// Why this command may fetch something else another time, if it may.
pub(super) fn unpinned(command: &[String]) -> Option<String> {
    let program = command.first()?.rsplit('/').next()?;
    let (options, is_exact, example): (_, fn(&str) -> bool, _) = match program {
        "npx" => (["-p", "--package"], is_npm_exact, "package@1.2.3"),
        "uvx" => (["--from", "--with"], is_python_exact, "package==1.2.3"),
        _ => return None,
    };
    let mut words = command.iter().skip(1).map(String::as_str);
    // Whether the program is part of a package that was named.
    let mut is_of_package = false;
    while let Some(word) = words.next() {
        let is_option = word.starts_with('-');
        let (option, value) = word.split_once('=').unwrap_or((word, ""));
        if is_option && !options.contains(&option) {
            continue;
        }
        if !is_option && is_of_package {
            return None;
        }
        let package = match (is_option, value) {
            (false, _) => word,
            (true, "") => words.next().unwrap_or_default(),
            (true, value) => value,
        };
        if !is_exact(package) {
            return Some(format!(
                "{package:?} names no exact version, such as {example} (other options as --name=value)"
            ));
        }
        if !is_option {
            return None;
        }
        is_of_package |= option != "--with";
    }
    None
}

fn is_npm_exact(package: &str) -> bool {
    let Some((name, version)) = package.rsplit_once('@') else { return is_file(package) };
    let numbers: Vec<_> = version.split(['-', '+']).next().unwrap_or_default().split('.').collect();
    !name.is_empty() && numbers.len() == 3 && numbers.iter().all(|number| is_number(number))
}

fn is_python_exact(package: &str) -> bool {
    let Some((name, version)) = package.split_once("==").or_else(|| package.split_once('@')) else {
        return is_file(package);
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || ".+!-".contains(c);
    let begins = version.split('.').next().unwrap_or_default();
    !name.is_empty() && is_number(begins) && version.chars().all(plain)
}

/// What is in the image is what it is.
fn is_file(package: &str) -> bool {
    package.starts_with('/') || package.starts_with("./")
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_pinned(line: &str) -> bool {
        let command: Vec<_> = line.split(' ').map(str::to_owned).collect();
        unpinned(&command).is_none()
    }

    #[test]
    fn a_package_has_an_exact_version() {
        for line in [
            "npx -y @modelcontextprotocol/server-everything@2026.8.31",
            "/usr/bin/npx package@1.2.3-beta.1 --port 1",
            "npx -y --package=@a/b@1.2.3 b latest",
            "npx ./server",
            "uvx mcp-server-git==2026.10.1 --repository /srv",
            "uvx mcp-server-git@2026.10.1",
            "uvx --from mcp-server-git[all]==2026.10.1 mcp-server-git",
            "uvx --with numpy==2.1 mcp-server-git==1.0",
            "node server.js",
        ] {
            assert!(is_pinned(line), "{line}");
        }
        for line in [
            "npx -y package",
            "npx @a/b",
            "npx package@latest",
            "npx package@^1.2.3",
            "npx package@1.x",
            "npx -p package b",
            "uvx mcp-server-git",
            "uvx mcp-server-git@latest",
            "uvx mcp-server-git==2026.*",
            "uvx --from mcp-server-git>=1 mcp-server-git",
            "uvx --with numpy==2.1 mcp-server-git",
            "uvx --with=numpy mcp-server-git==1.0",
        ] {
            assert!(!is_pinned(line), "{line}");
        }
    }
}
