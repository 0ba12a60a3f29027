//! COPY and ADD: flags, sources, where to.

use super::From;
use super::instruction::{Scope, take_flags};
use super::lines::Line;
use super::words::{expand_raw, split};

/// Patterns of `--exclude` in one instruction; each is tried on every path.
const EXCLUDES_MAX: usize = 100;

/// From the build context, or from elsewhere, into the image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copy {
    /// None: the build context.
    pub from: Option<From>,
    /// At least one, or a here-document.
    pub sources: Vec<String>,
    /// Files whose content is in the Dockerfile.
    pub inline: Vec<Inline>,
    pub destination: String,
    pub chown: Option<String>,
    /// Octal digits.
    pub chmod: Option<String>,
    /// Patterns of what is left out.
    pub exclude: Vec<String>,
    /// Sources keep the directories above them.
    pub parents: bool,
}

/// A file that is written in the Dockerfile itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inline {
    pub name: String,
    pub content: String,
}

impl Scope<'_> {
    pub(super) fn add(&self, line: &Line, rest: &str) -> Result<Copy, String> {
        let copy = self.copy("ADD", line, rest)?;
        if copy.from.is_some() {
            return Err("ADD --from is not supported: use COPY --from".to_owned());
        }
        let remote = |source: &&String| {
            source.contains("://") || source.starts_with("git@") || source.ends_with(".git")
        };
        match copy.sources.iter().find(remote) {
            None => Ok(copy),
            Some(source) => Err(format!(
                "ADD does not download ({source:?}): fetch it in a RUN, where the rules for what may \
                 leave a sandbox hold, or put it in the context"
            )),
        }
    }

    pub(super) fn copy(&self, keyword: &str, line: &Line, rest: &str) -> Result<Copy, String> {
        let (flags, rest) = take_flags(rest);
        let mut copy = Copy::default();
        for flag in flags {
            self.copy_flag(keyword, flag, &mut copy)?;
        }
        if let Some(mode) = &copy.chmod
            && u32::from_str_radix(mode, 8).ok().is_none_or(|mode| mode > 0o7777)
        {
            return Err(format!("--chmod={mode} is no mode like 755"));
        }
        let mut sources = match serde_json::from_str::<Vec<String>>(rest) {
            Ok(list) => list.iter().map(|word| self.expand(word)).collect::<Result<Vec<_>, _>>()?,
            Err(_) => self.copy_words(line, rest, &mut copy)?,
        };
        let destination = sources.pop().unwrap_or_default();
        if destination.is_empty() || sources.is_empty() && copy.inline.is_empty() {
            return Err("it needs what to copy, and where to".to_owned());
        }
        Ok(Copy { sources, destination, ..copy })
    }

    /// Sources and destination, but for here-documents, which go into `copy`.
    fn copy_words(&self, line: &Line, rest: &str, copy: &mut Copy) -> Result<Vec<String>, String> {
        let mut words = Vec::new();
        for word in split(rest, self.escape())? {
            let Some(heredoc) = line.heredocs.iter().find(|heredoc| heredoc.word == word) else {
                words.push(self.expand(&word)?);
                continue;
            };
            let content = match heredoc.literal {
                true => heredoc.content(),
                false => expand_raw(&heredoc.content(), self.escape(), &|name| self.lookup(name))?,
            };
            copy.inline.push(Inline { name: heredoc.name.clone(), content });
        }
        Ok(words)
    }

    fn copy_flag(&self, keyword: &str, flag: &str, copy: &mut Copy) -> Result<(), String> {
        let (name, value) = flag.split_once('=').unwrap_or((flag, "true"));
        let yes = |value: &str| match value {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err(format!("{flag:.80} is neither true nor false")),
        };
        match name {
            "--chown" => copy.chown = Some(self.expand(value)?),
            "--chmod" => copy.chmod = Some(self.expand(value)?),
            // Only says how layers are stored.
            "--link" => drop(yes(value)?),
            "--parents" => copy.parents = yes(value)?,
            "--exclude" if copy.exclude.len() == EXCLUDES_MAX => {
                return Err(format!("there are more than {EXCLUDES_MAX} --exclude"));
            }
            "--exclude" => copy.exclude.push(self.expand(value)?),
            "--from" => copy.from = Some(self.from(value)?),
            other => return Err(format!("{keyword} {other:.80} is not supported")),
        }
        Ok(())
    }

    /// A stage before this one, by name or number, or else an image.
    pub(super) fn from(&self, value: &str) -> Result<From, String> {
        let value = self.expand(value)?;
        let earlier = |stage: &usize| *stage < self.stage;
        if let Some(stage) = self.file.find(&value) {
            return match earlier(&stage) {
                true => Ok(From::Stage(stage)),
                false => Err(format!("the stage {value:.80} is not before this one")),
            };
        }
        match value.is_empty() || value.bytes().all(|b| b.is_ascii_digit()) {
            true => Err(format!("there is no stage {value:.80}")),
            false => Ok(From::Image(value)),
        }
    }
}
