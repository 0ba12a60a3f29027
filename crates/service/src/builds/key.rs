//! Keys of steps: all that goes into a step, hashed. Two steps of one key have the same result.
//!
//! Not in it: times of files, the values of secrets, what cache mounts hold, proxies, and whatever only
//! the configuration of the image says.

use std::io;

use blake3::Hasher;
use torpor_store::dockerfile::{Copy, Mount, MountKind, PROXY_ARGS, Run};

use super::context::{Context, Node};
use super::copy::{self, Excluded, Mistake};
use super::draft::Draft;

/// Raised when steps of the same text come to mean something else.
const HEADING: &[u8] = b"torpor build step 1\n";

/// Hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key(String);

impl Key {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// An image that a stage begins with.
    pub(super) fn of_image(id: &str) -> Self {
        Hash::new(None, "FROM").text(id).key()
    }
}

/// A key in the making. Every part is preceded by its length.
pub(super) struct Hash(Hasher);

impl Hash {
    /// After the step before.
    pub(super) fn new(before: Option<&Key>, keyword: &str) -> Self {
        let mut hasher = Hasher::new();
        hasher.update(HEADING);
        Self(hasher).text(before.map_or("", Key::as_str)).text(keyword)
    }

    pub(super) fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub(super) fn run(self, run: &Run, draft: &Draft) -> Self {
        let mut args = run.args.clone();
        args.retain(|name, _| !PROXY_ARGS.contains(&name.as_str()));
        let mounts: Vec<_> = run.mounts.iter().map(without_from).collect();
        let (workdir, user) = (draft.workdir(), &draft.config.user);
        self.text(&format!("{:?} {workdir:?} {user:?}", run.command))
            .text(&format!("{:?}", draft.env(&args)))
            .text(&format!("{mounts:?}"))
    }

    /// All about a copy but what is copied.
    pub(super) fn copy(self, copy: &Copy, draft: &Draft) -> Self {
        let about = Copy { from: None, ..copy.clone() };
        self.text(&format!("{about:?}")).text(draft.workdir())
    }

    /// What of the context is copied. Blocks.
    pub(super) fn content(self, context: &Context, copy: &Copy) -> Result<Self, Mistake> {
        let mut hash = self;
        for found in copy::sources(context, copy)? {
            let below = Excluded::of(copy).keep(context.below(&found.path));
            let own = (found.path.as_str(), "");
            for (path, rest) in std::iter::once(own).chain(below) {
                let Some(node) = context.node(path) else { continue };
                hash = hash.text(path).text(rest).node(context, node).map_err(|error| {
                    format!("{path:.200} of the build context can't be read: {error}")
                })?;
            }
        }
        Ok(hash)
    }

    fn node(self, context: &Context, node: &Node) -> io::Result<Self> {
        Ok(match node {
            Node::Dir { meta } => self.text(&format!("d{:o}", meta.mode)),
            Node::Link { target, .. } => self.text("l").bytes(target),
            Node::File { meta, at, size } => {
                let mut content = Hasher::new();
                io::copy(&mut context.content(*at, *size), &mut content)?;
                let content = content.finalize();
                self.text(&format!("f{:o}", meta.mode)).bytes(content.as_bytes())
            }
        })
    }

    pub(super) fn key(self) -> Key {
        Key(self.0.finalize().to_hex().to_string())
    }
}

/// Where it takes from is told by that one's key, not by its place in the file.
fn without_from(mount: &Mount) -> Mount {
    let Mount { target, kind } = mount.clone();
    let kind = match kind {
        MountKind::Bind { source, .. } => MountKind::Bind { from: None, source },
        other @ (MountKind::Cache { .. } | MountKind::Secret { .. } | MountKind::Tmpfs) => other,
    };
    Mount { target, kind }
}

/// A bind mount as the copy that it amounts to.
pub(super) fn bound(source: &str, target: &str) -> Copy {
    let (sources, destination) = (vec![source.to_owned()], target.to_owned());
    Copy { sources, destination, ..Copy::default() }
}

#[cfg(test)]
mod tests {

    use torpor_store::ImageConfig;
    use torpor_store::dockerfile::{Dockerfile, Instruction};

    use super::*;

    /// The key of the last command of a stage.
    fn key(text: &str, args: &[(&str, &str)]) -> Key {
        let args = args.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let file = Dockerfile::parse(&format!("FROM x\n{text}"), &args.collect()).unwrap();
        let mut draft = Draft::from(ImageConfig::default());
        let mut key = Key::of_image("0");
        for step in file.steps(0, &[]).unwrap() {
            draft.note(&step.instruction);
            if let Instruction::Run(run) = &step.instruction {
                key = Hash::new(Some(&key), "RUN").run(run, &draft).key();
            }
        }
        key
    }

    #[test]
    fn a_key_is_told_by_what_a_command_sees_and_by_nothing_else() {
        let plain = key("RUN make\n", &[]);
        for same in
            ["LABEL a=b\nRUN make\n", "CMD x\nEXPOSE 80\nRUN    make\n", "ARG A\nRUN make\n"]
        {
            assert_eq!(key(same, &[]), plain, "{same}");
        }
        assert_eq!(key("RUN make\n", &[("http_proxy", "p"), ("UNUSED", "u")]), plain);
        for other in [
            "RUN make all\n",
            "ENV A=1\nRUN make\n",
            "ARG A=1\nRUN make\n",
            "USER app\nRUN make\n",
            "WORKDIR /src\nRUN make\n",
            "RUN --mount=type=secret,id=a make\n",
            "RUN --mount=type=cache,target=/c make\n",
            "RUN true\nRUN make\n",
            "SHELL [\"/bin/bash\", \"-c\"]\nRUN make\n",
        ] {
            assert_ne!(key(other, &[]), plain, "{other}");
        }
        assert_ne!(key("ARG A\nRUN make\n", &[("A", "2")]), plain);
        assert_ne!(Key::of_image("0"), Key::of_image("1"));
    }

    /// The key of `COPY . /` of a context with one file.
    fn copied(mtime: u64, mode: u32, content: &str) -> Key {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(mode);
        header.set_mtime(mtime);
        header.set_uid(0);
        header.set_gid(0);
        builder.append_data(&mut header, "a", content.as_bytes()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("upload");
        std::fs::write(&path, builder.into_inner().unwrap()).unwrap();
        let context = Context::open(&path, dir.path()).unwrap();
        let draft = Draft::from(ImageConfig::default());
        let copy = bound(".", "/");
        Hash::new(None, "COPY").copy(&copy, &draft).content(&context, &copy).unwrap().key()
    }

    #[test]
    fn the_time_of_a_file_does_not_matter_but_its_content_and_mode_do() {
        let plain = copied(1, 0o644, "x");
        assert_eq!(copied(2, 0o644, "x"), plain);
        assert_ne!(copied(1, 0o755, "x"), plain);
        assert_ne!(copied(1, 0o644, "y"), plain);
    }
}
