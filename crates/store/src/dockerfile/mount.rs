//! `RUN --mount`: what a command finds while it runs.

use super::From;
use super::instruction::Scope;

/// Mounts of one command.
const MOUNTS_MAX: usize = 32;
const SECRETS_DIR: &str = "/run/secrets";

/// Something at a path while a command runs; afterwards the path is as it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Maybe relative to the working directory; empty for a secret that is only a variable.
    pub target: String,
    pub kind: MountKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MountKind {
    /// A directory that the next build finds as this one left it.
    Cache { id: String, owner: Option<String>, mode: Option<u32> },
    /// A value that the builder gave, as a file, a variable, or both.
    Secret { id: String, required: bool, owner: Option<String>, mode: u32, env: Option<String> },
    /// Files of the context, or of another stage or image; what is written to them is lost.
    Bind { from: Option<From>, source: String },
    /// An empty directory.
    Tmpfs,
}

/// What is between the commas.
#[derive(Default)]
struct Options {
    kind: Option<String>,
    id: Option<String>,
    target: Option<String>,
    source: Option<String>,
    from: Option<String>,
    env: Option<String>,
    required: bool,
    mode: Option<u32>,
    uid: Option<u32>,
    gid: Option<u32>,
}

impl Scope<'_> {
    /// The flags of a RUN.
    pub(super) fn mounts(&self, flags: &[&str]) -> Result<Vec<Mount>, String> {
        let mut mounts = Vec::new();
        for flag in flags {
            match flag.split_once('=').unwrap_or((flag, "")) {
                ("--mount", _) if mounts.len() == MOUNTS_MAX => {
                    return Err(format!("there are more than {MOUNTS_MAX} mounts"));
                }
                ("--mount", value) => mounts.push(self.mount(&self.expand(value)?)?),
                ("--network", "default") | ("--security", "sandbox") => {}
                _ => return Err(format!("RUN {flag:.80} is not supported")),
            }
        }
        Ok(mounts)
    }

    fn mount(&self, text: &str) -> Result<Mount, String> {
        let options = Options::parse(text)?;
        let owner = match (options.uid, options.gid) {
            (None, None) => None,
            (uid, gid) => Some(format!("{}:{}", uid.unwrap_or(0), gid.unwrap_or(0))),
        };
        let needs = |what: &str, value: Option<String>| {
            value
                .filter(|value| !value.is_empty())
                .ok_or(format!("--mount={text:.80} needs {what}"))
        };
        let Options { target, source, mode, .. } = options;
        match options.kind.as_deref().unwrap_or("bind") {
            "cache" if options.from.is_some() || source.is_some() => {
                Err("RUN --mount=type=cache with from or source is not supported".to_owned())
            }
            "cache" => {
                let target = needs("a target", target)?;
                let id = options.id.unwrap_or_else(|| target.clone());
                Ok(Mount { target, kind: MountKind::Cache { id, owner, mode } })
            }
            "secret" => {
                let env = options.env;
                let own = target.as_deref().and_then(|target| target.rsplit('/').next());
                let id = needs("an id", options.id.or(own.map(str::to_owned)))?;
                check_id(&id)?;
                let target = match (target, &env) {
                    (Some(target), _) => target,
                    (None, Some(_)) => String::new(),
                    (None, None) => format!("{SECRETS_DIR}/{id}"),
                };
                let (required, mode) = (options.required, mode.unwrap_or(0o400));
                Ok(Mount { target, kind: MountKind::Secret { id, required, owner, mode, env } })
            }
            "bind" => {
                let from = options.from.map(|from| self.from(&from)).transpose()?;
                let source = source.unwrap_or_else(|| ".".to_owned());
                Ok(Mount {
                    target: needs("a target", target)?,
                    kind: MountKind::Bind { from, source },
                })
            }
            "tmpfs" => Ok(Mount { target: needs("a target", target)?, kind: MountKind::Tmpfs }),
            "ssh" => Err("RUN --mount=type=ssh is not supported: use a secret".to_owned()),
            other => Err(format!("RUN --mount=type={other:.40} is not supported")),
        }
    }
}

impl Options {
    fn parse(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').unwrap_or((part, "true"));
            let number = |radix| {
                let bad = |_| format!("--mount: {part:.80} is no number");
                u32::from_str_radix(value, radix).map_err(bad)
            };
            let text = Some(value.to_owned());
            match key {
                "type" => options.kind = text,
                "id" => options.id = text,
                "target" | "dst" | "destination" => options.target = text,
                "source" | "src" => options.source = text,
                "from" => options.from = text,
                "env" => options.env = text,
                "required" => options.required = value == "true",
                "mode" => options.mode = Some(number(8)?),
                "uid" => options.uid = Some(number(10)?),
                "gid" => options.gid = Some(number(10)?),
                // One build at a time has a cache, whatever is asked for; writes to the rest are lost.
                "sharing" if ["shared", "private", "locked"].contains(&value) => {}
                "ro" | "readonly" | "rw" | "readwrite" | "size" => {}
                _ => return Err(format!("RUN --mount: {part:.80} is not supported")),
            }
        }
        Ok(options)
    }
}

/// It becomes a name in a directory.
fn check_id(id: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if id.len() > 128 || id.starts_with('.') || !id.chars().all(plain) {
        return Err(format!("{id:.80?} is no id of a secret"));
    }
    Ok(())
}
