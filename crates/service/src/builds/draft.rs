//! The configuration of the image that is being built, as its steps change it. Pure.

use std::collections::BTreeMap;

use torpor_store::ImageConfig;
use torpor_store::dockerfile::{Command, Instruction};

use super::copy::absolute;

#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) config: ImageConfig,
    /// Whether CMD is this Dockerfile's own.
    own_cmd: bool,
}

impl Draft {
    /// Begins with what the base image says.
    pub(super) fn from(config: ImageConfig) -> Self {
        Self { config, own_cmd: false }
    }

    pub(super) fn workdir(&self) -> &str {
        self.config.workdir.as_deref().unwrap_or("/")
    }

    /// The environment of a command.
    pub(super) fn env(&self, args: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut env = args.clone();
        env.extend(self.config.env.iter().cloned());
        env
    }

    /// Takes over what a step says about the image.
    pub(super) fn note(&mut self, instruction: &Instruction) {
        match instruction {
            Instruction::Env(pairs) => pairs.iter().for_each(|pair| self.set_env(pair)),
            Instruction::Workdir(path) => {
                self.config.workdir = Some(absolute(self.workdir(), path));
            }
            Instruction::User(user) => self.config.user = Some(user.clone()),
            Instruction::Entrypoint(command) => {
                self.config.entrypoint = words(command);
                // Arguments for another program make no sense for this one.
                if !self.own_cmd {
                    self.config.cmd.clear();
                }
            }
            Instruction::Cmd(command) => {
                self.config.cmd = words(command);
                self.own_cmd = true;
            }
            Instruction::Expose(ports) => {
                self.config.exposed.extend(ports.iter().cloned());
                self.config.exposed.sort();
                self.config.exposed.dedup();
            }
            Instruction::Label(pairs) => self.config.labels.extend(pairs.iter().cloned()),
            Instruction::Run(_)
            | Instruction::Copy(_)
            | Instruction::Add(_)
            | Instruction::Ignored => {}
        }
    }

    fn set_env(&mut self, (name, value): &(String, String)) {
        match self.config.env.iter_mut().find(|(known, _)| known == name) {
            Some((_, known)) => known.clone_from(value),
            None => self.config.env.push((name.clone(), value.clone())),
        }
    }
}

/// A command as program and arguments.
pub(super) fn words(command: &Command) -> Vec<String> {
    match command {
        Command::Exec(words) => words.clone(),
        Command::Shell(text) => vec!["/bin/sh".to_owned(), "-c".to_owned(), text.clone()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_store::dockerfile::Dockerfile;

    fn draft(text: &str) -> Draft {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let base = ImageConfig {
            env: vec![pair("PATH", "/bin"), pair("A", "old")],
            cmd: vec!["base".to_owned()],
            workdir: Some("/srv".to_owned()),
            ..ImageConfig::default()
        };
        let file = Dockerfile::parse(&format!("FROM x\n{text}"), &BTreeMap::new()).unwrap();
        let mut draft = Draft::from(base.clone());
        for step in file.steps(0, &base.env).unwrap() {
            draft.note(&step.instruction);
        }
        draft
    }

    #[test]
    fn variables_are_replaced_in_their_place_and_hide_arguments() {
        let draft = draft("ENV A=new B=$PATH:/x\n");
        let env: Vec<_> = draft.config.env.iter().map(|(k, v)| format!("{k}={v}")).collect();
        assert_eq!(env, ["PATH=/bin", "A=new", "B=/bin:/x"]);
        let args =
            BTreeMap::from([("A".to_owned(), "arg".to_owned()), ("C".to_owned(), "c".to_owned())]);
        let env = draft.env(&args);
        assert_eq!((env["A"].as_str(), env["C"].as_str()), ("new", "c"));
    }

    #[test]
    fn directories_follow_each_other() {
        assert_eq!(draft("WORKDIR app\nWORKDIR ../lib/.\n").workdir(), "/srv/lib");
        assert_eq!(draft("WORKDIR /a/b\n").workdir(), "/a/b");
    }

    #[test]
    fn a_new_entrypoint_forgets_the_arguments_of_the_base_only() {
        assert!(draft("ENTRYPOINT [\"/run\"]\n").config.cmd.is_empty());
        assert_eq!(draft("CMD [\"a\"]\nENTRYPOINT [\"/run\"]\n").config.cmd, ["a"]);
        assert_eq!(draft("").config.cmd, ["base"]);
        assert_eq!(draft("ENTRYPOINT exec it\n").config.entrypoint, ["/bin/sh", "-c", "exec it"]);
    }

    #[test]
    fn exposed_ports_are_noted_once_each() {
        let draft = draft("EXPOSE 8080 53/UDP\nEXPOSE 8080/tcp 9000-9002\n");
        let ports = ["53/udp", "8080/tcp", "9000/tcp", "9001/tcp", "9002/tcp"];
        assert_eq!(draft.config.exposed, ports);
        for text in ["http", "80/icmp", "9-1", "70000", "1-60000", "-", "/tcp"] {
            let text = format!("FROM x\nEXPOSE 1 {text}\n");
            let steps = Dockerfile::parse(&text, &BTreeMap::new()).and_then(|it| it.steps(0, &[]));
            assert!(steps.is_err(), "{text}");
        }
    }

    #[test]
    fn labels_and_user_are_taken_over() {
        let draft = draft("LABEL team=blue\nUSER app:staff\n");
        assert_eq!(draft.config.labels["team"], "blue");
        assert_eq!(draft.config.user.as_deref(), Some("app:staff"));
    }
}
