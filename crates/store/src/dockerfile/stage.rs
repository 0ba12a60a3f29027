//! Stages: what stands before the first FROM, and what each FROM begins.

use std::collections::BTreeMap;

use super::lines::Line;
use super::words::{self, Spent};
use super::{Dockerfile, STAGES_MAX, instruction};

/// A FROM and what follows it.
#[derive(Debug, Clone)]
pub struct Stage {
    /// Where its FROM is.
    pub line: usize,
    /// Its FROM as it was written.
    pub text: String,
    pub name: Option<String>,
    pub base: Base,
    pub(super) lines: Vec<Line>,
}

/// What a stage starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Base {
    /// As it is written there; `scratch` is an empty one.
    Image(String),
    /// One of the stages before.
    Stage(usize),
}

impl Dockerfile {
    /// Takes a line: of the stage that is open, a FROM, or an ARG before the first.
    pub(super) fn take(&mut self, line: Line, spent: &Spent) -> Result<(), String> {
        let (keyword, rest) = instruction::keyword(&line.text);
        match (keyword.as_str(), self.stages.last_mut()) {
            ("FROM", _) => {
                let stage = self.read_from(&line, rest, spent)?;
                self.stages.push(stage);
                Ok(())
            }
            (_, Some(stage)) => {
                stage.lines.push(line);
                Ok(())
            }
            ("ARG", None) => self.read_global_arg(rest, spent),
            (_, None) => Err(format!("{keyword:.40} comes before FROM")),
        }
    }

    /// The stage of this name, or else of this number.
    pub(super) fn find(&self, wanted: &str) -> Option<usize> {
        let named = |stage: &Stage| {
            stage.name.as_ref().is_some_and(|name| name.eq_ignore_ascii_case(wanted))
        };
        let number = || wanted.parse().ok().filter(|number| *number < self.stages.len());
        self.stages.iter().rposition(named).or_else(number)
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

    fn read_from(&self, line: &Line, rest: &str, spent: &Spent) -> Result<Stage, String> {
        if self.stages.len() == STAGES_MAX {
            return Err(format!("there are more than {STAGES_MAX} stages"));
        }
        let lookup = |name: &str| spent.copy(self.global_args.get(name));
        let mut words = Vec::new();
        for word in words::split(rest, self.escape)? {
            let word = words::expand(&word, self.escape, &lookup)?;
            match word.strip_prefix("--") {
                Some(flag) => refuse_platform(flag)?,
                None => words.push(word),
            }
        }
        let (base, name) = match words.as_slice() {
            [base] => (base, None),
            [base, keyword, name] if keyword.eq_ignore_ascii_case("as") => (base, Some(name)),
            [..] => return Err("FROM needs the name of one image".to_owned()),
        };
        if base.is_empty() {
            return Err("FROM names no image once its variables are replaced".to_owned());
        }
        if let Some(name) = name {
            self.check_name(name)?;
        }
        let named =
            |stage: &Stage| stage.name.as_ref().is_some_and(|name| name.eq_ignore_ascii_case(base));
        let base = match self.stages.iter().rposition(named) {
            Some(stage) => Base::Stage(stage),
            None => Base::Image(base.clone()),
        };
        let (number, text) = (line.number, line.text.clone());
        Ok(Stage { line: number, text, name: name.cloned(), base, lines: Vec::new() })
    }

    fn check_name(&self, name: &str) -> Result<(), String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(plain) {
            return Err(format!("{name:.80?} is no name for a stage"));
        }
        let same = |stage: &Stage| {
            stage.name.as_ref().is_some_and(|other| other.eq_ignore_ascii_case(name))
        };
        match self.stages.iter().any(same) {
            true => Err(format!("there are two stages of the name {name:.80}")),
            false => Ok(()),
        }
    }
}

/// The processor of this host, as images call it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// What every FROM can use, and every stage that asks for it with an ARG.
pub(super) fn platform_args() -> BTreeMap<String, String> {
    let (os, arch) = ("linux", architecture());
    let mut args = BTreeMap::new();
    for whose in ["TARGET", "BUILD"] {
        args.insert(format!("{whose}PLATFORM"), format!("{os}/{arch}"));
        args.insert(format!("{whose}OS"), os.to_owned());
        args.insert(format!("{whose}ARCH"), arch.to_owned());
        args.insert(format!("{whose}VARIANT"), String::new());
    }
    args
}

fn refuse_platform(flag: &str) -> Result<(), String> {
    let ours = format!("linux/{}", architecture());
    match flag.split_once('=') {
        Some(("platform", platform)) if platform == ours => Ok(()),
        Some(("platform", platform)) => {
            Err(format!("the platform {platform:.80?} is not that of this host, {ours}"))
        }
        Some(_) | None => Err(format!("FROM --{flag:.80} is not supported")),
    }
}
