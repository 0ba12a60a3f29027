//! One instruction after another, with the variables that hold at its place.

use std::collections::BTreeMap;

use super::lines::Line;
use super::words::{Spent, expand, split};
use super::{Command, Dockerfile, Instruction, PROXY_ARGS, Run};

/// Ports of one EXPOSE.
const PORTS_MAX: usize = 1024;
/// These mean nothing in a sandbox, which has no health checks, stop signals or anonymous volumes.
const IGNORED: [&str; 4] = ["HEALTHCHECK", "MAINTAINER", "STOPSIGNAL", "VOLUME"];

/// Writes a script with an interpreter of its own to a file and runs that; the script is `$0`.
const AS_SCRIPT: &str = "f=$(mktemp) && printf %s \"$0\" >\"$f\" && chmod 755 \"$f\" && \
    { \"$f\"; c=$?; rm -f \"$f\"; exit $c; }";

/// The variables at some line.
pub(super) struct Scope<'a> {
    pub(super) file: &'a Dockerfile,
    /// Which stage it is.
    pub(super) stage: usize,
    env: BTreeMap<String, String>,
    args: BTreeMap<String, String>,
    /// Set by SHELL; empty: the default.
    shell: Vec<String>,
    spent: Spent,
}

impl<'a> Scope<'a> {
    pub(super) fn new(file: &'a Dockerfile, stage: usize, base_env: &[(String, String)]) -> Self {
        let env = base_env.iter().cloned().collect();
        let (args, shell, spent) = (BTreeMap::new(), Vec::new(), Spent::default());
        Self { file, stage, env, args, shell, spent }
    }

    /// Reads an instruction; `None` if it only changed the scope. `Err` says what is wrong.
    pub(super) fn read(&mut self, line: &Line) -> Result<Option<Instruction>, String> {
        let (keyword, rest) = keyword(&line.text);
        let instruction = match keyword.as_str() {
            "RUN" => self.run(line, rest)?,
            "COPY" => Instruction::Copy(self.copy("COPY", line, rest)?),
            "ADD" => Instruction::Add(self.add(line, rest)?),
            "ENV" => self.env(rest)?,
            "ARG" => return self.arg(rest).map(|()| None),
            "SHELL" => return self.shell(rest).map(|()| None),
            "WORKDIR" => Instruction::Workdir(self.one("WORKDIR", "a directory", rest)?),
            "USER" => Instruction::User(self.one("USER", "a user", rest)?),
            "ENTRYPOINT" => Instruction::Entrypoint(self.command("ENTRYPOINT", rest)?),
            "CMD" => Instruction::Cmd(self.command("CMD", rest)?),
            "LABEL" => Instruction::Label(self.pairs("LABEL", rest)?),
            "EXPOSE" => Instruction::Expose(ports(&self.words(rest)?)?),
            "ONBUILD" => return Err("ONBUILD is not supported".to_owned()),
            other if IGNORED.contains(&other) => Instruction::Ignored,
            other => {
                let shown: String = other.chars().take(40).collect();
                return Err(format!("{shown:?} is no instruction"));
            }
        };
        Ok(Some(instruction))
    }

    fn run(&self, line: &Line, rest: &str) -> Result<Instruction, String> {
        let (flags, rest) = take_flags(rest);
        let mounts = self.mounts(&flags)?;
        self.spent.take(self.args.iter().map(|(name, value)| name.len() + value.len()).sum())?;
        let mut args = self.args.clone();
        for name in PROXY_ARGS {
            let given = self.spent.copy(self.file.build_args.get(name))?;
            args.extend(given.map(|value| (name.to_owned(), value)));
        }
        // A variable hides an argument of the same name.
        args.retain(|name, _| !self.env.contains_key(name));
        let command = match line.heredocs.as_slice() {
            [] => self.command("RUN", rest)?,
            [script] if script.word == rest => self.script(&script.content())?,
            heredocs => {
                let mut text = rest.to_owned();
                for heredoc in heredocs {
                    text.push_str(&format!("\n{}{}", heredoc.raw, heredoc.name));
                }
                self.command("RUN", &text)?
            }
        };
        Ok(Instruction::Run(Run { command, args, mounts }))
    }

    /// A here-document that is all of a command.
    fn script(&self, content: &str) -> Result<Command, String> {
        if content.trim().is_empty() {
            return Err("RUN needs a command".to_owned());
        }
        if !content.starts_with("#!") {
            return self.in_shell(content);
        }
        let words = ["/bin/sh", "-c", AS_SCRIPT, content];
        Ok(Command::Exec(words.map(str::to_owned).to_vec()))
    }

    fn command(&self, keyword: &str, rest: &str) -> Result<Command, String> {
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
        self.in_shell(rest)
    }

    /// In the shell that holds here.
    fn in_shell(&self, text: &str) -> Result<Command, String> {
        if self.shell.is_empty() {
            return Ok(Command::Shell(text.to_owned()));
        }
        self.spent.take(self.shell.iter().map(String::len).sum())?;
        let mut words = self.shell.clone();
        words.push(text.to_owned());
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

    pub(super) fn escape(&self) -> char {
        self.file.escape
    }

    pub(super) fn expand(&self, word: &str) -> Result<String, String> {
        expand(word, self.file.escape, &|name| self.lookup(name))
    }

    pub(super) fn lookup(&self, name: &str) -> Result<Option<String>, String> {
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
pub(super) fn take_flags(mut rest: &str) -> (Vec<&str>, &str) {
    let mut flags = Vec::new();
    while rest.starts_with("--") {
        let (flag, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        flags.push(flag);
        rest = after.trim_start();
    }
    (flags, rest)
}

/// Ports as images have them: `8080/tcp`, each of a range.
fn ports(words: &[String]) -> Result<Vec<String>, String> {
    let mut ports = Vec::new();
    for word in words {
        let bad = || format!("EXPOSE {word:.40} is no port");
        let (range, protocol) = word.split_once('/').unwrap_or((word, "tcp"));
        let protocol = protocol.to_ascii_lowercase();
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let first: u16 = first.parse().map_err(|_| bad())?;
        let last: u16 = last.parse().map_err(|_| bad())?;
        let count = usize::from(last.checked_sub(first).ok_or_else(bad)?) + 1;
        if !["tcp", "udp", "sctp"].contains(&protocol.as_str()) {
            return Err(bad());
        }
        if ports.len() + count > PORTS_MAX {
            return Err(format!("EXPOSE names more than {PORTS_MAX} ports"));
        }
        ports.extend((first..=last).map(|port| format!("{port}/{protocol}")));
    }
    Ok(ports)
}
