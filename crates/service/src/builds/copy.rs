//! Where COPY and ADD put things: paths of the context in, places in the image out. Pure.
//!
//! As container engines do it: a directory's content is copied, not the directory; the destination
//! is a directory if it ends with `/`, is one already, or takes more than one source.

use torpor_store::dockerfile::Copy;

use super::context::{Context, Node};
use super::pattern;

/// What to unpack, and below which directory of the image.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) root: String,
    pub(super) placements: Vec<Placement>,
    /// Archives of the context to be unpacked below `root`.
    pub(super) archives: Vec<String>,
}

/// One file, directory or link.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// In the context.
    pub(super) source: String,
    /// Below the root of the plan.
    pub(super) name: String,
}

/// A step that can't be done as it is written, for people.
pub(super) type Mistake = String;

/// Plans a step. `is_dir` says whether the destination is a directory already; `archive` which files
/// are to be unpacked.
pub(super) fn plan(
    context: &Context,
    copy: &Copy,
    workdir: &str,
    is_dir: bool,
    archive: impl Fn(&str) -> bool,
) -> Result<Plan, Mistake> {
    let destination = absolute(workdir, &copy.destination);
    let sources = sources(context, copy)?;
    let names_dir = names_dir(&copy.destination);
    if sources.len() > 1 && !names_dir {
        let shown = &copy.destination;
        return Err(format!(
            "there are several things to copy, so the destination must be a directory: write {shown}/"
        ));
    }
    let mut plan = Plan { root: destination.clone(), ..Plan::default() };
    for source in sources {
        match context.node(&source) {
            Some(Node::Dir { .. }) => {
                let below = context.below(&source);
                plan.placements.extend(below.map(|(source, name)| Placement {
                    source: source.to_owned(),
                    name: name.to_owned(),
                }));
            }
            Some(Node::File { .. }) if archive(&source) => plan.archives.push(source),
            Some(Node::File { .. } | Node::Link { .. }) => {
                let own = |source: &str| source.rsplit('/').next().unwrap_or_default().to_owned();
                let mut name = own(&source);
                if !names_dir && !is_dir {
                    let (parent, last) = destination.rsplit_once('/').unwrap_or(("", ""));
                    plan.root = if parent.is_empty() { "/".to_owned() } else { parent.to_owned() };
                    name = last.to_owned();
                }
                plan.placements.push(Placement { source, name });
            }
            None => return Err(missing(&source)),
        }
    }
    Ok(plan)
}

/// The paths of the context that a step means.
fn sources(context: &Context, copy: &Copy) -> Result<Vec<String>, Mistake> {
    let mut found = Vec::new();
    for source in &copy.sources {
        let path =
            super::context::relative(source.as_bytes()).map_err(|error| error.to_string())?;
        if !pattern::is_pattern(&path) {
            context.node(&path).ok_or_else(|| missing(source))?;
            found.push(path);
            continue;
        }
        let before = found.len();
        found.extend(context.paths().filter(|it| pattern::matches(&path, it)).map(str::to_owned));
        if found.len() == before {
            return Err(missing(source));
        }
    }
    Ok(found)
}

fn missing(source: &str) -> Mistake {
    let shown: String = source.chars().take(200).collect();
    format!("there is no {shown:?} in the build context, or its .dockerignore leaves it out")
}

fn names_dir(destination: &str) -> bool {
    let last = destination.rsplit('/').next().unwrap_or_default();
    ["", ".", ".."].contains(&last)
}

/// A path of the image, from the directory where it was said.
pub(super) fn absolute(workdir: &str, path: &str) -> String {
    let whole = if path.starts_with('/') { path.to_owned() } else { format!("{workdir}/{path}") };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "sources… destination" from /work.
    fn plan_of(line: &str, is_dir: bool) -> Result<String, Mistake> {
        let context =
            Context::of(&["a.txt", "b.txt", "src/main.rs", "src/lib/x.rs", "empty/", "c.tar"]);
        let mut sources: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let destination = sources.pop().unwrap();
        let copy = Copy { sources, destination, chown: None, chmod: None };
        let plan = plan(&context, &copy, "/work", is_dir, |path| path.ends_with(".tar"))?;
        let placed = plan.placements.iter().map(|it| format!(" {}={}", it.source, it.name));
        let archives = plan.archives.iter().map(|it| format!(" unpack {it}"));
        Ok(format!("{}:{}", plan.root, placed.chain(archives).collect::<String>()))
    }

    #[test]
    fn destinations_mean_what_they_mean_elsewhere() {
        for (line, is_dir, expected) in [
            // A file to a name, into a directory that is named as one, into one that is there.
            ("a.txt /opt/b", false, "/opt: a.txt=b"),
            ("a.txt /b", false, "/: a.txt=b"),
            ("a.txt /opt/", false, "/opt: a.txt=a.txt"),
            ("a.txt /opt", true, "/opt: a.txt=a.txt"),
            ("a.txt .", false, "/work: a.txt=a.txt"),
            ("a.txt ./", false, "/work: a.txt=a.txt"),
            ("a.txt x", false, "/work: a.txt=x"),
            ("a.txt ../x", false, "/: a.txt=x"),
            ("/a.txt /", false, "/: a.txt=a.txt"),
            ("src/main.rs /opt/", false, "/opt: src/main.rs=main.rs"),
            // The content of a directory.
            ("src /opt", false, "/opt: src/lib=lib src/lib/x.rs=lib/x.rs src/main.rs=main.rs"),
            ("./src/ /opt/", true, "/opt: src/lib=lib src/lib/x.rs=lib/x.rs src/main.rs=main.rs"),
            ("empty /opt", false, "/opt:"),
            // Several.
            ("a.txt b.txt /opt/", false, "/opt: a.txt=a.txt b.txt=b.txt"),
            ("*.txt /opt/", false, "/opt: a.txt=a.txt b.txt=b.txt"),
            ("a.* /opt/x", false, "/opt: a.txt=x"),
            ("src/*.rs /opt/", false, "/opt: src/main.rs=main.rs"),
            // An archive always goes into a directory.
            ("c.tar /opt", false, "/opt: unpack c.tar"),
            ("c.tar a.txt /opt/", false, "/opt: a.txt=a.txt unpack c.tar"),
        ] {
            assert_eq!(plan_of(line, is_dir).as_deref(), Ok(expected), "{line}");
        }
    }

    #[test]
    fn the_whole_context_can_be_copied() {
        let plan = plan_of(". /app", false).unwrap();
        assert!(plan.starts_with("/app: a.txt=a.txt b.txt=b.txt"), "{plan}");
        assert!(plan.contains(" src/lib/x.rs=src/lib/x.rs"), "{plan}");
    }

    #[test]
    fn mistakes_are_told() {
        let error = plan_of("*.txt /opt", false).unwrap_err();
        assert!(error.contains("/opt/"), "{error}");
        for line in ["missing /opt", "*.md /opt/", "../a.txt /opt", "a.txt/x /opt"] {
            assert!(plan_of(line, false).is_err(), "{line}");
        }
    }
}
