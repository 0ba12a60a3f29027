//! One instruction after another, with the variables that hold at its place.

use std::collections::BTreeMap;

use super::words::{Spent, expand, split};
use super::{Command, Copy, Dockerfile, Instruction};

/// These mean nothing in a sandbox, which has no health checks, stop signals or anonymous volumes.
const IGNORED: [&str; 4] = ["HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "VOLUME"];

/// The variables at some line.
pub(super) struct Scope<'a> {
    file: &'a Dockerfile,
    env: BTreeMap<String, String>,
    args: BTreeMap<String, String>,
    /// Set by SHELL; empty: the default.
    shell: Vec<String>,
    spent: Spent,
}

impl<'a> Scope<'a> {
    pub(super) fn new(file: &'a Dockerfile, base_env: &[(String, String)]) -> Self {
        let env = base_env.iter().cloned().collect();
        Self { file, env, args: BTreeMap::new(), shell: Vec::new(), spent: Spent::default() }
    }

    /// Reads an instruction; `None` if it only changed the scope. `Err` says what is wrong.
    pub(super) fn read(&mut self, line: &str) -> Result<Option<Instruction>, String> {
        let (keyword, rest) = keyword(line);
        let instruction = match keyword.as_str() {
            "RUN" => self.run(rest)?,
            "COPY" => Instruction::Copy(self.copy(rest)?),
            "ADD" => Instruction::Add(self.add(rest)?),
            "ENV" => self.env(rest)?,
            "ARG" => return self.arg(rest).map(|()| None),
            "SHELL" => return self.shell(rest).map(|()| None),
            "WORKDIR" => Instruction::Workdir(self.one("WORKDIR", "a directory", rest)?),
            "USER" => Instruction::User(self.one("USER", "a user", rest)?),
            "ENTRYPOINT" => Instruction::Entrypoint(self.command("ENTRYPOINT", rest)?),
            "CMD" => Instruction::Cmd(self.command("CMD", rest)?),
            "LABEL" => Instruction::Label(self.pairs("LABEL", rest)?),
            "EXPOSE" => Instruction::Expose(self.words(rest)?),
            "FROM" => {
                return Err("builds in several stages are not supported: a second FROM".to_owned());
            }
            "ONBUILD" => return Err("ONBUILD is not supported".to_owned()),
            other if IGNORED.contains(&other) => Instruction::Ignored,
            other => {
                let shown: String = other.chars().take(40).collect();
                return Err(format!("{shown:?} is no instruction"));
            }
        };
        Ok(Some(instruction))
    }

    fn run(&self, rest: &str) -> Result<Instruction, String> {
        if let Some(flag) = rest.strip_prefix("--") {
            let flag = flag.split(['=', ' ']).next().unwrap_or_default();
            return Err(format!("RUN --{flag} is not supported"));
        }
        self.spent.take(self.args.iter().map(|(name, value)| name.len() + value.len()).sum())?;
        let mut args = self.args.clone();
        // A variable hides an argument of the same name.
        args.retain(|name, _| !self.env.contains_key(name));
        Ok(Instruction::Run { command: self.command("RUN", rest)?, args })
    }

    fn command(&self, keyword: &str, rest: &str) -> Result<Command, String> {
        refuse_heredoc(rest)?;
        if rest.starts_with('[')
            && let Ok(words) = serde_json::from_str::<Vec<String>>(rest)
        {
            // An empty list takes back what the base image says; running nothing is a mistake.
            if keyword == "RUN" && words.is_empty() {
                return Err("RUN needs a command".to_owned());
            }
            return Ok(Command::Exec(words));
        }
        if rest.is_empty() {
            return Err(format!("{keyword} needs a command"));
        }
        if self.shell.is_empty() {
            return Ok(Command::Shell(rest.to_owned()));
        }
        self.spent.take(self.shell.iter().map(String::len).sum())?;
        let mut words = self.shell.clone();
        words.push(rest.to_owned());
        Ok(Command::Exec(words))
    }

    fn shell(&mut self, rest: &str) -> Result<(), String> {
        match serde_json::from_str::<Vec<String>>(rest) {
            Ok(words) if !words.is_empty() => self.shell = words,
            Ok(_) | Err(_) => {
                return Err("SHELL needs a list like [\"/bin/bash\", \"-c\"]".to_owned());
            }
        }
        Ok(())
    }

    fn add(&self, rest: &str) -> Result<Copy, String> {
        let copy = self.copy(rest)?;
        let remote = |source: &&String| {
            source.contains("://") || source.starts_with("git@") || source.ends_with(".git")
        };
        match copy.sources.iter().find(remote) {
            None => Ok(copy),
            Some(source) => Err(format!(
                "ADD does not download ({source:?}): fetch it in a RUN, or put it in the context"
            )),
        }
    }

    fn copy(&self, rest: &str) -> Result<Copy, String> {
        refuse_heredoc(rest)?;
        let (flags, rest) = take_flags(rest);
        let (mut chown, mut chmod) = (None, None);
        for flag in flags {
            match flag.split_once('=').unwrap_or((flag, "")) {
                ("--chown", owner) => chown = Some(self.expand(owner)?),
                ("--chmod", mode) => chmod = Some(self.expand(mode)?),
                // Only says how layers are stored.
                ("--link", _) => {}
                ("--from", _) => {
                    return Err(
                        "builds in several stages are not supported: COPY --from".to_owned()
                    );
                }
                (other, _) => return Err(format!("{other} is not supported here")),
            }
        }
        if let Some(mode) = &chmod
            && u32::from_str_radix(mode, 8).ok().is_none_or(|mode| mode > 0o7777)
        {
            return Err(format!("--chmod={mode} is no mode like 755"));
        }
        let mut sources = match serde_json::from_str::<Vec<String>>(rest) {
            Ok(list) => list.iter().map(|word| self.expand(word)).collect::<Result<_, _>>()?,
            Err(_) => self.words(rest)?,
        };
        match sources.pop() {
            Some(destination) if !sources.is_empty() && !destination.is_empty() => {
                Ok(Copy { sources, destination, chown, chmod })
            }
            Some(_) | None => Err("it needs what to copy, and where to".to_owned()),
        }
    }

    fn env(&mut self, rest: &str) -> Result<Instruction, String> {
        let pairs = self.pairs("ENV", rest)?;
        self.env.extend(pairs.iter().cloned());
        Ok(Instruction::Env(pairs))
    }

    /// `KEY=VALUE …`, or the old form `KEY VALUE`.
    fn pairs(&self, keyword: &str, rest: &str) -> Result<Vec<(String, String)>, String> {
        let words = split(rest, self.file.escape)?;
        let Some(first) = words.first() else {
            return Err(format!("{keyword} needs a name and a value"));
        };
        if !first.contains('=') {
            let value = rest[first.len()..].trim_start();
            if value.is_empty() {
                return Err(format!("{keyword} {first} needs a value"));
            }
            return Ok(vec![(self.key(keyword, first)?, self.expand(value)?)]);
        }
        let pair = |word: &String| match word.split_once('=') {
            Some((key, value)) => Ok((self.key(keyword, key)?, self.expand(value)?)),
            None => Err(format!("{keyword}: {word:?} has no value; quote values with spaces")),
        };
        words.iter().map(pair).collect()
    }

    fn key(&self, keyword: &str, raw: &str) -> Result<String, String> {
        let key = self.expand(raw)?;
        if key.is_empty() || key.contains(['=', '\0']) {
            return Err(format!("{keyword}: {raw:?} is no name"));
        }
        Ok(key)
    }

    fn arg(&mut self, rest: &str) -> Result<(), String> {
        let words = split(rest, self.file.escape)?;
        if words.is_empty() {
            return Err("ARG needs a name".to_owned());
        }
        for word in words {
            let lookup = |name: &str| self.lookup(name);
            let (name, default) = arg(&word, self.file.escape, &lookup)?;
            let given = self.spent.copy(self.file.build_args.get(&name))?;
            let global = self.spent.copy(self.file.global_args.get(&name))?;
            if let Some(value) = given.or(default).or(global) {
                self.args.insert(name, value);
            }
        }
        Ok(())
    }

    fn one(&self, keyword: &str, what: &str, rest: &str) -> Result<String, String> {
        let value = self.expand(rest)?;
        if value.is_empty() {
            return Err(format!("{keyword} needs {what}"));
        }
        Ok(value)
    }

    fn words(&self, rest: &str) -> Result<Vec<String>, String> {
        split(rest, self.file.escape)?.iter().map(|word| self.expand(word)).collect()
    }

    fn expand(&self, word: &str) -> Result<String, String> {
        expand(word, self.file.escape, &|name| self.lookup(name))
    }

    fn lookup(&self, name: &str) -> Result<Option<String>, String> {
        self.spent.copy(self.env.get(name).or_else(|| self.args.get(name)))
    }
}

/// The first word in capitals, and the rest of the line.
pub(super) fn keyword(line: &str) -> (String, &str) {
    let (first, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    (first.to_ascii_uppercase(), rest.trim())
}

/// `NAME` or `NAME=default`.
pub(super) fn arg(
    word: &str,
    escape: char,
    lookup: super::words::Lookup<'_>,
) -> Result<(String, Option<String>), String> {
    let (name, default) = match word.split_once('=') {
        Some((name, default)) => (name, Some(expand(default, escape, lookup)?)),
        None => (word, None),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(plain)
    {
        return Err(format!("ARG: {name:?} is no name"));
    }
    Ok((name.to_owned(), default))
}

/// The `--flag` words at the start, and the rest.
fn take_flags(mut rest: &str) -> (Vec<&str>, &str) {
    let mut flags = Vec::new();
    while rest.starts_with("--") {
        let (flag, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        flags.push(flag);
        rest = after.trim_start();
    }
    (flags, rest)
}

/// `<<WORD`: the lines after it would be taken for instructions.
fn refuse_heredoc(rest: &str) -> Result<(), String> {
    let heredoc = |word: &str| {
        let word = word.trim_start_matches(|c: char| c.is_ascii_digit());
        let mark = word.strip_prefix("<<").map(|mark| mark.trim_start_matches('-'));
        mark.is_some_and(|mark| !mark.is_empty() && !mark.starts_with('<'))
    };
    if rest.split_whitespace().any(heredoc) {
        return Err("here-documents (<<) are not supported: use several RUN or a file".to_owned());
    }
    Ok(())
}
