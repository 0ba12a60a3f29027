//! The environment and the words of a command that is run with sudo.

use std::collections::BTreeMap;

use super::arguments::{Keep, Run, Shell};
use super::name_of;
use crate::ca::VARIABLES;
use crate::process::PATH;
use crate::process::user::Account;

/// What describes the caller's screen, language and way to the network, and so is as true for the
/// command; whom to trust on that way is too. Names that end with `_` stand for all that begin so.
const USUAL: [&str; 14] = [
    "TERM",
    "COLORTERM",
    "LANG",
    "LANGUAGE",
    "LC_",
    "DISPLAY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
];
const DEFAULT_SHELL: &str = "/bin/sh";

pub(super) fn environment(
    run: &Run,
    theirs: &BTreeMap<String, String>,
    caller: &Account,
    target: &Account,
) -> BTreeMap<String, String> {
    let kept = theirs.iter().filter(|(name, _)| keeps(run, name));
    let mut env: BTreeMap<String, String> =
        kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    let mut set = |name: &str, value: String| drop(env.insert(name.to_owned(), value));
    let kept_by_name = |name: &str| match &run.keep {
        Keep::All => theirs.contains_key(name),
        Keep::Named(names) => theirs.contains_key(name) && names.iter().any(|it| it == name),
        Keep::Usual => false,
    };
    let login = run.shell == Some(Shell::Login);
    if run.set_home || login || !kept_by_name("HOME") {
        set("HOME", home(target));
    }
    if login || !kept_by_name("SHELL") {
        set("SHELL", shell_of(target));
    }
    if !kept_by_name("PATH") {
        set("PATH", PATH.to_owned());
    }
    // Whose process it is can't be kept from the caller's.
    set("USER", name_of(target));
    set("LOGNAME", name_of(target));
    set("SUDO_USER", name_of(caller));
    set("SUDO_UID", caller.uid.to_string());
    set("SUDO_GID", caller.gid.to_string());
    set("SUDO_COMMAND", command(run, theirs, target).join(" "));
    for (name, value) in &run.assignments {
        set(name, value.clone());
    }
    env
}

fn keeps(run: &Run, name: &str) -> bool {
    let usual = |known: &str| match known.ends_with('_') {
        true => name.starts_with(known),
        false => name == known,
    };
    let trusted = VARIABLES.map(|(name, _)| name);
    match &run.keep {
        Keep::All => true,
        Keep::Named(names) if names.iter().any(|it| it == name) => true,
        Keep::Named(_) | Keep::Usual => USUAL.into_iter().chain(trusted).any(usual),
    }
}

/// The words to execute.
pub(super) fn command(
    run: &Run,
    theirs: &BTreeMap<String, String>,
    target: &Account,
) -> Vec<String> {
    let mut words = match run.shell {
        None => return run.command.clone(),
        Some(Shell::Login) => vec![shell_of(target), "-l".to_owned()],
        Some(Shell::Plain) => {
            let theirs = theirs.get("SHELL").filter(|shell| !shell.is_empty());
            vec![theirs.cloned().unwrap_or_else(|| shell_of(target))]
        }
    };
    if !run.command.is_empty() {
        let line: Vec<String> = run.command.iter().map(|word| escape(word)).collect();
        words.extend(["-c".to_owned(), line.join(" ")]);
    }
    words
}

/// A word such that a shell reads it as one, but still puts variables in.
fn escape(word: &str) -> String {
    if word.is_empty() {
        return "''".to_owned();
    }
    let mut escaped = String::with_capacity(word.len());
    for letter in word.chars() {
        match letter {
            // Behind a backslash, a line's end would vanish.
            '\n' => escaped.push_str("'\n'"),
            '_' | '-' | '$' => escaped.push(letter),
            letter if letter.is_alphanumeric() => escaped.push(letter),
            letter => escaped.extend(['\\', letter]),
        }
    }
    escaped
}

pub(super) fn home(account: &Account) -> String {
    account.home.clone().unwrap_or_else(|| "/".to_owned())
}

fn shell_of(account: &Account) -> String {
    account.shell.clone().unwrap_or_else(|| DEFAULT_SHELL.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(name: &str, uid: u32) -> Account {
        Account {
            uid,
            gid: uid,
            groups: vec![uid],
            name: Some(name.to_owned()),
            home: Some(format!("/home/{name}")),
            shell: Some("/bin/bash".to_owned()),
        }
    }

    fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn theirs() -> BTreeMap<String, String> {
        pairs(&[
            ("HOME", "/home/bob"),
            ("LC_ALL", "C"),
            ("LD_PRELOAD", "/x.so"),
            ("PATH", "/venv/bin"),
            ("SHELL", "/bin/zsh"),
            ("TERM", "xterm"),
            ("TERMINFO", "/x"),
            ("USER", "bob"),
            ("https_proxy", "p:1"),
        ])
    }

    fn made(run: &Run) -> BTreeMap<String, String> {
        environment(run, &theirs(), &account("bob", 1000), &account("root", 0))
    }

    fn run(words: &[&str]) -> Run {
        Run { command: words.iter().map(|word| (*word).to_owned()).collect(), ..Run::default() }
    }

    #[test]
    fn the_command_gets_the_targets_environment_and_the_callers_screen() {
        let expected = pairs(&[
            ("HOME", "/home/root"),
            ("LC_ALL", "C"),
            ("LOGNAME", "root"),
            ("PATH", PATH),
            ("SHELL", "/bin/bash"),
            ("SUDO_COMMAND", "id -u"),
            ("SUDO_GID", "1000"),
            ("SUDO_UID", "1000"),
            ("SUDO_USER", "bob"),
            ("TERM", "xterm"),
            ("USER", "root"),
            ("https_proxy", "p:1"),
        ]);
        assert_eq!(made(&run(&["id", "-u"])), expected);
    }

    #[test]
    fn everything_is_kept_on_demand_but_who_one_is() {
        let env = made(&Run { keep: Keep::All, ..run(&["id"]) });
        for name in ["HOME", "LD_PRELOAD", "PATH", "SHELL", "TERMINFO"] {
            assert_eq!(env[name], theirs()[name]);
        }
        assert_eq!((env["USER"].as_str(), env["SUDO_USER"].as_str()), ("root", "bob"));
        let env = made(&Run { keep: Keep::All, set_home: true, ..run(&["id"]) });
        assert_eq!(env["HOME"], "/home/root");
    }

    #[test]
    fn one_variable_is_kept_on_demand() {
        let keep = Keep::Named(vec!["TERMINFO".to_owned(), "PATH".to_owned(), "NONE".to_owned()]);
        let env = made(&Run { keep, ..run(&["id"]) });
        assert_eq!((env["TERMINFO"].as_str(), env["PATH"].as_str()), ("/x", "/venv/bin"));
        assert!(!env.contains_key("LD_PRELOAD") && !env.contains_key("NONE"));
        assert_eq!((env["HOME"].as_str(), env["TERM"].as_str()), ("/home/root", "xterm"));
    }

    #[test]
    fn an_assignment_wins() {
        let assignments = vec![("HOME".to_owned(), "/x".to_owned())];
        assert_eq!(made(&Run { assignments, ..run(&["id"]) })["HOME"], "/x");
    }

    #[test]
    fn a_shell_reads_the_words_as_they_were() {
        let root = account("root", 0);
        let login = Run { shell: Some(Shell::Login), ..run(&["echo", "a b", "", "$HOME;'x'"]) };
        let words = command(&login, &theirs(), &root);
        assert_eq!(words, ["/bin/bash", "-l", "-c", "echo a\\ b '' $HOME\\;\\'x\\'"]);
        let plain = Run { shell: Some(Shell::Plain), ..run(&[]) };
        assert_eq!(command(&plain, &theirs(), &root), ["/bin/zsh"]);
        assert_eq!(command(&plain, &BTreeMap::new(), &root), ["/bin/bash"]);
    }
}
