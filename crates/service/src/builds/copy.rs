//! Where COPY and ADD put things: paths of the context in, places in the image out. Pure.
//!
//! As container engines do it: a directory's content is copied, not the directory; the destination
//! is a directory if it ends with `/`, is one already, or takes more than one source.

use torpor_protocol::pattern::{self, Ignore};
use torpor_store::dockerfile::Copy;

use super::context::{Context, Node};

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
    pub(super) source: Source,
    /// Below the root of the plan.
    pub(super) name: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// In the context.
    Path(String),
    /// Which here-document of the step.
    Inline(usize),
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
    if sources.len() + copy.inline.len() > 1 && !names_dir {
        let shown = &copy.destination;
        return Err(format!(
            "there are several things to copy, so the destination must be a directory: write {shown}/"
        ));
    }
    let mut plan = Plan { root: destination, ..Plan::default() };
    for (index, inline) in copy.inline.iter().enumerate() {
        plan.put(Source::Inline(index), inline.name.clone(), names_dir || is_dir);
    }
    for Found { path, name } in sources {
        match context.node(&path) {
            Some(Node::Dir { .. }) => {
                let at = |rest: &str| match copy.parents {
                    true => format!("{name}/{rest}").trim_matches('/').to_owned(),
                    false => rest.to_owned(),
                };
                if copy.parents && !name.is_empty() {
                    plan.placements
                        .push(Placement { source: Source::Path(path.clone()), name: at("") });
                }
                let below = Excluded::of(copy).keep(context.below(&path));
                plan.placements.extend(below.map(|(source, rest)| Placement {
                    source: Source::Path(source.to_owned()),
                    name: at(rest),
                }));
            }
            Some(Node::File { .. }) if archive(&path) => plan.archives.push(path),
            Some(Node::File { .. } | Node::Link { .. }) => {
                let into_dir = names_dir || is_dir || copy.parents;
                plan.put(Source::Path(path), name, into_dir);
            }
            None => return Err(missing(&path)),
        }
    }
    Ok(plan)
}

impl Plan {
    /// One file, under its own name in the destination, or as the destination.
    fn put(&mut self, source: Source, own: String, into_dir: bool) {
        let mut name = own;
        if !into_dir {
            let (parent, last) = self.root.rsplit_once('/').unwrap_or(("", ""));
            name = last.to_owned();
            self.root = if parent.is_empty() { "/".to_owned() } else { parent.to_owned() };
        }
        self.placements.push(Placement { source, name });
    }
}

/// Something of the context that a step means.
pub(super) struct Found {
    pub(super) path: String,
    /// What it is called in a directory: its last name, or with `--parents` all of them.
    name: String,
}

impl Found {
    fn new(path: String, pivot: usize, parents: bool) -> Self {
        let name = match parents {
            true => path.get(pivot..).unwrap_or_default().trim_start_matches('/').to_owned(),
            false => path.rsplit('/').next().unwrap_or_default().to_owned(),
        };
        Self { path, name }
    }
}

/// What a step leaves out of what it copies.
pub(super) struct Excluded(Option<Ignore>);

impl Excluded {
    pub(super) fn of(copy: &Copy) -> Self {
        Self((!copy.exclude.is_empty()).then(|| Ignore::parse(&copy.exclude.join("\n"))))
    }

    fn ignores(&self, path: &str) -> bool {
        self.0.as_ref().is_some_and(|ignore| ignore.ignores(path))
    }

    /// Those of a directory's content that stay.
    pub(super) fn keep<'a>(
        self,
        below: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        below.filter(move |(path, rest)| !self.ignores(rest) && !self.ignores(path))
    }
}

/// The paths of the context that a step means.
pub(super) fn sources(context: &Context, copy: &Copy) -> Result<Vec<Found>, Mistake> {
    let excluded = Excluded::of(copy);
    let mut found = Vec::new();
    for source in &copy.sources {
        let clean = |text: &str| {
            super::context::relative(text.as_bytes()).map_err(|error| error.to_string())
        };
        let path = clean(source)?;
        // `a/./b` keeps b and what is below, but not a.
        let pivot = match source.split_once("/./") {
            Some((before, _)) => clean(before)?.len(),
            None => 0,
        };
        if !pattern::is_pattern(&path) {
            context.node(&path).ok_or_else(|| missing(source))?;
            found.push(Found::new(path, pivot, copy.parents));
            continue;
        }
        let before = found.len();
        let fits = |it: &&str| pattern::matches(&path, it) && !excluded.ignores(it);
        let paths = context.paths().filter(fits);
        found.extend(paths.map(|path| Found::new(path.to_owned(), pivot, copy.parents)));
        if found.len() == before {
            return Err(missing(source));
        }
    }
    Ok(found)
}

/// The paths of another tree that have to be looked at: patterns stand for the directory they are in.
pub(super) fn roots(copy: &Copy) -> Result<Vec<String>, Mistake> {
    let root = |source: &String| {
        let path =
            super::context::relative(source.as_bytes()).map_err(|error| error.to_string())?;
        let parts = path.split('/').take_while(|part| !pattern::is_pattern(part));
        Ok(parts.collect::<Vec<_>>().join("/"))
    };
    let mut roots = copy.sources.iter().map(root).collect::<Result<Vec<_>, Mistake>>()?;
    roots.sort();
    roots.dedup();
    Ok(roots)
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
        let mut copy = Copy { sources, destination, ..Copy::default() };
        while let Some(flag) = copy.sources.first().filter(|it| it.starts_with("--")).cloned() {
            match flag.split_once('=') {
                Some((_, pattern)) => copy.exclude.push(pattern.to_owned()),
                None => copy.parents = true,
            }
            copy.sources.remove(0);
        }
        let plan = plan(&context, &copy, "/work", is_dir, |path| path.ends_with(".tar"))?;
        let placed = plan.placements.iter().map(|it| match &it.source {
            Source::Path(path) => format!(" {path}={}", it.name),
            Source::Inline(index) => format!(" <<{index}={}", it.name),
        });
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
            // With the directories above them, and without some.
            ("--parents src/main.rs /opt", false, "/opt: src/main.rs=src/main.rs"),
            ("--parents src/./lib/x.rs /opt/", false, "/opt: src/lib/x.rs=lib/x.rs"),
            ("--parents src/lib /opt/", false, "/opt: src/lib=src/lib src/lib/x.rs=src/lib/x.rs"),
            ("--exclude=lib src /opt", false, "/opt: src/main.rs=main.rs"),
            ("--exclude=**/*.rs src /opt", false, "/opt: src/lib=lib"),
            ("--exclude=a.* *.txt /opt/", false, "/opt: b.txt=b.txt"),
            // An archive always goes into a directory.
            ("c.tar /opt", false, "/opt: unpack c.tar"),
            ("c.tar a.txt /opt/", false, "/opt: a.txt=a.txt unpack c.tar"),
        ] {
            assert_eq!(plan_of(line, is_dir).as_deref(), Ok(expected), "{line}");
        }
    }

    #[test]
    fn of_another_tree_only_what_is_meant_is_looked_at() {
        let copy = |sources: &[&str]| Copy {
            sources: sources.iter().map(|source| (*source).to_owned()).collect(),
            ..Copy::default()
        };
        let found = roots(&copy(&["/usr/bin/go", "lib/*/x", "/usr/bin/go", "*.so"])).unwrap();
        assert_eq!(found, ["", "lib", "usr/bin/go"]);
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
