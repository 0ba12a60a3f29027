//! Dockerfiles, understood but not executed: text in, stages and their steps out.
//!
//! Supported: FROM (several stages), RUN (mounts, here-documents), COPY, ADD, ENV, ARG, WORKDIR, USER,
//! ENTRYPOINT, CMD, LABEL, EXPOSE, SHELL. Everything else is refused with its line, or listed as
//! [`Instruction::Ignored`] where a sandbox has no use for it. Reads no file and knows no image:
//! variables of the base image are given to [`Dockerfile::steps`].

mod copy;
mod instruction;
mod lines;
mod mount;
mod stage;
mod words;

use std::collections::BTreeMap;

use words::Spent;

pub use copy::{Copy, Inline};
pub use mount::{Mount, MountKind};
pub use stage::{Base, Stage};

/// Largest Dockerfile.
const TEXT_MAX: usize = 1024 * 1024;
/// Most stages: what a build with a sandbox for each may reasonably be.
const STAGES_MAX: usize = 100;
/// These are given to every RUN without an ARG, and change nothing of its result.
pub const PROXY_ARGS: [&str; 10] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "FTP_PROXY",
    "ftp_proxy",
    "NO_PROXY",
    "no_proxy",
    "ALL_PROXY",
    "all_proxy",
];

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
    Run(Run),
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

/// A command of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub command: Command,
    /// Build arguments, which this command sees as environment variables.
    pub args: BTreeMap<String, String>,
    /// What is there while it runs, and not afterwards.
    pub mounts: Vec<Mount>,
}

/// How a command was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// For `/bin/sh -c`.
    Shell(String),
    Exec(Vec<String>),
}

/// Files of another stage or image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum From {
    /// By its place among the stages, which is before whoever takes from it.
    Stage(usize),
    Image(String),
}

/// A Dockerfile whose every line is understood.
#[derive(Debug, Clone)]
pub struct Dockerfile {
    stages: Vec<Stage>,
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
            stages: Vec::new(),
            escape,
            build_args: build_args.clone(),
            global_args: stage::platform_args(),
        };
        let spent = Spent::default();
        for line in lines {
            let number = line.number;
            file.take(line, &spent).map_err(|message| DockerfileError::new(number, message))?;
        }
        if file.stages.is_empty() {
            return Err(DockerfileError::new(1, "there is no FROM"));
        }
        // Tells now what is wrong, whatever the base image's variables will be.
        for stage in 0..file.stages.len() {
            file.steps(stage, &[])?;
        }
        Ok(file)
    }

    /// At least one.
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// The stage that is to be built: the last one, or the one of this name or number.
    pub fn target(&self, wanted: Option<&str>) -> Option<usize> {
        match wanted {
            None => self.stages.len().checked_sub(1),
            Some(wanted) => self.find(wanted),
        }
    }

    /// The value that was given for a build argument, whether or not an ARG asks for it.
    pub fn given(&self, name: &str) -> Option<&str> {
        self.build_args.get(name).map(String::as_str)
    }

    /// The steps after a stage's FROM, with these variables of its base.
    pub fn steps(
        &self,
        stage: usize,
        base_env: &[(String, String)],
    ) -> Result<Vec<Step>, DockerfileError> {
        let Some(lines) = self.stages.get(stage).map(|stage| &stage.lines) else {
            return Err(DockerfileError::new(1, "there is no such stage"));
        };
        let mut scope = instruction::Scope::new(self, stage, base_env);
        let mut steps = Vec::new();
        for line in lines {
            let read = scope.read(line);
            let read = read.map_err(|message| DockerfileError::new(line.number, message))?;
            if let Some(instruction) = read {
                steps.push(Step { line: line.number, text: line.text.clone(), instruction });
            }
        }
        Ok(steps)
    }
}

#[cfg(test)]
mod tests;
