//! Dockerfiles, understood but not executed: text in, a list of steps out.
//!
//! Supported: FROM, RUN, COPY, ADD (local), ENV, ARG, WORKDIR, USER, ENTRYPOINT, CMD, LABEL, EXPOSE,
//! SHELL; one stage. Everything else is refused with its line, or listed as [`Instruction::Ignored`]
//! where a sandbox has no use for it. Reads no file and knows no image: variables of the base image
//! are given to [`Dockerfile::steps`].

mod instruction;
mod lines;
mod words;

use std::collections::BTreeMap;

use lines::Line;
use words::Spent;

/// Largest Dockerfile.
const TEXT_MAX: usize = 1024 * 1024;

/// What is wrong with a Dockerfile, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the Dockerfile: {message}")]
pub struct DockerfileError {
    pub line: usize,
    pub message: String,
}

impl DockerfileError {
    fn new(line: usize, message: impl Into<String>) -> Self {
        Self { line, message: message.into() }
    }
}

/// A step of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where it starts.
    pub line: usize,
    /// As it was written, for showing progress.
    pub text: String,
    pub instruction: Instruction,
}

/// What a step does. Variables are replaced, except in commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    Run {
        command: Command,
        /// Build arguments, which this command sees as environment variables.
        args: BTreeMap<String, String>,
    },
    Copy(Copy),
    /// Like `Copy`, but a local tar archive is unpacked.
    Add(Copy),
    Env(Vec<(String, String)>),
    Workdir(String),
    User(String),
    Entrypoint(Command),
    Cmd(Command),
    Label(Vec<(String, String)>),
    Expose(Vec<String>),
    /// Means nothing in a sandbox.
    Ignored,
}

/// How a command was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// For `/bin/sh -c`.
    Shell(String),
    Exec(Vec<String>),
}

/// From the build context into the image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// At least one.
    pub sources: Vec<String>,
    pub destination: String,
    pub chown: Option<String>,
    pub chmod: Option<String>,
}

/// A Dockerfile whose every line is understood.
#[derive(Debug, Clone)]
pub struct Dockerfile {
    base: String,
    lines: Vec<Line>,
    escape: char,
    /// What the builder gave for the file's ARGs.
    build_args: BTreeMap<String, String>,
    /// Values of ARGs before FROM, which ARGs after it may take over.
    global_args: BTreeMap<String, String>,
}

impl Dockerfile {
    /// Parses a Dockerfile; `build_args` are what `--build-arg` is elsewhere.
    pub fn parse(
        text: &str,
        build_args: &BTreeMap<String, String>,
    ) -> Result<Self, DockerfileError> {
        if text.len() > TEXT_MAX {
            let message = format!("it has more than {TEXT_MAX} bytes");
            return Err(DockerfileError::new(1, message));
        }
        let (lines, escape) = lines::split(text)?;
        let mut file = Self {
            base: String::new(),
            lines: Vec::new(),
            escape,
            build_args: build_args.clone(),
            global_args: BTreeMap::new(),
        };
        let spent = Spent::default();
        for (index, line) in lines.iter().enumerate() {
            if file.read_top(line, &spent)? {
                file.lines = lines[index + 1..].to_vec();
                // Tells now what is wrong, whatever the base image's variables will be.
                file.steps(&[])?;
                return Ok(file);
            }
        }
        Err(DockerfileError::new(1, "there is no FROM"))
    }

    /// The image it starts from, as it is written there; `scratch` is an empty one.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The steps after FROM, with these variables of the base image.
    pub fn steps(&self, base_env: &[(String, String)]) -> Result<Vec<Step>, DockerfileError> {
        let mut scope = instruction::Scope::new(self, base_env);
        let mut steps = Vec::new();
        for line in &self.lines {
            let read = scope.read(&line.text);
            let read = read.map_err(|message| DockerfileError::new(line.number, message))?;
            if let Some(instruction) = read {
                steps.push(Step { line: line.number, text: line.text.clone(), instruction });
            }
        }
        Ok(steps)
    }

    /// A line up to FROM; whether this was it.
    fn read_top(&mut self, line: &Line, spent: &Spent) -> Result<bool, DockerfileError> {
        let (keyword, rest) = instruction::keyword(&line.text);
        let read = match keyword.as_str() {
            "ARG" => self.read_global_arg(rest, spent).map(|()| false),
            "FROM" => self.read_from(rest, spent).map(|()| true),
            _ => Err(format!("{keyword} comes before FROM")),
        };
        read.map_err(|message| DockerfileError::new(line.number, message))
    }

    fn read_global_arg(&mut self, rest: &str, spent: &Spent) -> Result<(), String> {
        for word in words::split(rest, self.escape)? {
            let lookup = |name: &str| spent.copy(self.global_args.get(name));
            let (name, default) = instruction::arg(&word, self.escape, &lookup)?;
            if let Some(value) = spent.copy(self.build_args.get(&name))?.or(default) {
                self.global_args.insert(name, value);
            }
        }
        Ok(())
    }

    fn read_from(&mut self, rest: &str, spent: &Spent) -> Result<(), String> {
        let lookup = |name: &str| spent.copy(self.global_args.get(name));
        let mut words = Vec::new();
        for word in words::split(rest, self.escape)? {
            let word = words::expand(&word, self.escape, &lookup)?;
            match word.strip_prefix("--") {
                Some(flag) => refuse_platform(flag)?,
                None => words.push(word),
            }
        }
        // The name of an only stage changes nothing; a second stage is refused at its FROM.
        let base = match words.as_slice() {
            [base] => base,
            [base, keyword, _] if keyword.eq_ignore_ascii_case("as") => base,
            [..] => return Err("FROM needs the name of one image".to_owned()),
        };
        if base.is_empty() {
            return Err("FROM names no image once its variables are replaced".to_owned());
        }
        self.base.clone_from(base);
        Ok(())
    }
}

fn refuse_platform(flag: &str) -> Result<(), String> {
    let ours = match std::env::consts::ARCH {
        "x86_64" => "linux/amd64",
        "aarch64" => "linux/arm64",
        other => other,
    };
    match flag.split_once('=') {
        Some(("platform", platform)) if platform == ours => Ok(()),
        Some(("platform", platform)) => {
            Err(format!("the platform {platform:?} is not that of this host, {ours}"))
        }
        Some(_) | None => Err(format!("FROM --{flag} is not supported")),
    }
}

#[cfg(test)]
mod tests;
