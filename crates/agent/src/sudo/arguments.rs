//! What the words after `sudo` mean.

/// What to print for `-h` and after a mistake.
pub(super) const USAGE: &str = "\
usage: sudo [-EHknS] [-u user] [VAR=value] [-i | -s] [command [argument ...]]
       sudo -l | -v | -k | -K | -V | -h";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Help,
    Version,
    /// What may I do?
    List,
    /// May I do anything?
    Validate,
    /// Forget the password, which nobody ever asked for.
    Forget,
    Run(Run),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    /// Root if none is named.
    pub(super) user: Option<String>,
    pub(super) keep: Keep,
    pub(super) set_home: bool,
    pub(super) shell: Option<Shell>,
    pub(super) assignments: Vec<(String, String)>,
    /// Empty only with a shell.
    pub(super) command: Vec<String>,
}

/// What of the caller's environment is kept beyond the usual.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Keep {
    #[default]
    Usual,
    Named(Vec<String>),
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shell {
    /// The target's, in its home directory.
    Login,
    /// The caller's.
    Plain,
}

/// Reads the words; the error says which one is wrong.
pub(super) fn parse(words: &[String]) -> Result<Wanted, String> {
    let mut parsed = Parsed::default();
    let mut words = words.iter();
    let mut flags = true;
    while let Some(word) = words.next() {
        if flags && word == "--" {
            flags = false;
        } else if let Some(long) = word.strip_prefix("--").filter(|_| flags) {
            parsed.long(long, &mut words)?;
        } else if let Some(short) = word.strip_prefix('-').filter(|it| flags && !it.is_empty()) {
            parsed.short(short, &mut words)?;
        } else if let Some(assignment) = assignment(word) {
            parsed.run.assignments.push(assignment);
        } else {
            parsed.run.command.push(word.clone());
            parsed.run.command.extend(words.cloned());
            break;
        }
    }
    parsed.wanted()
}

#[derive(Default)]
struct Parsed {
    run: Run,
    /// What is wanted instead of running something.
    instead: Option<Wanted>,
    forget: bool,
}

impl Parsed {
    fn long<'a>(
        &mut self,
        flag: &str,
        rest: &mut impl Iterator<Item = &'a String>,
    ) -> Result<(), String> {
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, None),
        };
        if let ("preserve-env", Some(names)) = (name, value) {
            self.keep_named(names);
            return Ok(());
        }
        let letter = match name {
            "help" => 'h',
            "list" => 'l',
            "login" => 'i',
            "non-interactive" => 'n',
            "preserve-env" => 'E',
            "prompt" => 'p',
            "remove-timestamp" => 'K',
            "reset-timestamp" => 'k',
            "set-home" => 'H',
            "shell" => 's',
            "stdin" => 'S',
            "user" => 'u',
            "validate" => 'v',
            "version" => 'V',
            _ => return Err(format!("unrecognized option '--{name}'")),
        };
        match (takes_value(letter), value) {
            (true, Some(value)) => self.valued(letter, value),
            (true, None) => {
                let value = rest.next();
                let missing = || format!("option '--{name}' requires an argument");
                self.valued(letter, value.ok_or_else(missing)?);
            }
            (false, Some(_)) => return Err(format!("option '--{name}' takes no argument")),
            (false, None) => self.flag(letter)?,
        }
        Ok(())
    }

    /// Letters behind one dash; the rest of them is the value of one that takes a value.
    fn short<'a>(
        &mut self,
        letters: &str,
        rest: &mut impl Iterator<Item = &'a String>,
    ) -> Result<(), String> {
        for (at, letter) in letters.char_indices() {
            if !takes_value(letter) {
                self.flag(letter)?;
                continue;
            }
            match &letters[at + letter.len_utf8()..] {
                "" => {
                    let value = rest.next();
                    let missing = || format!("option requires an argument -- '{letter}'");
                    self.valued(letter, value.ok_or_else(missing)?);
                }
                value => self.valued(letter, value),
            }
            break;
        }
        Ok(())
    }

    fn valued(&mut self, letter: char, value: &str) {
        // The prompt for a password is never shown.
        if letter == 'u' {
            // Numbers are told from names by this sign.
            self.run.user = Some(value.strip_prefix('#').unwrap_or(value).to_owned());
        }
    }

    fn flag(&mut self, letter: char) -> Result<(), String> {
        match letter {
            'E' => self.run.keep = Keep::All,
            'H' => self.run.set_home = true,
            'i' => self.run.shell = Some(Shell::Login),
            's' => self.run.shell = Some(Shell::Plain),
            // Nobody is asked for a password.
            'n' | 'S' => {}
            'k' | 'K' => self.forget = true,
            'l' => self.instead = Some(Wanted::List),
            'v' => self.instead = Some(Wanted::Validate),
            'V' => self.instead = Some(Wanted::Version),
            'h' => self.instead = Some(Wanted::Help),
            _ => return Err(format!("invalid option -- '{letter}'")),
        }
        Ok(())
    }

    fn keep_named(&mut self, names: &str) {
        let more = names.split(',').filter(|name| !name.is_empty()).map(str::to_owned);
        match &mut self.run.keep {
            Keep::All => {}
            Keep::Named(named) => named.extend(more),
            Keep::Usual => self.run.keep = Keep::Named(more.collect()),
        }
    }

    fn wanted(self) -> Result<Wanted, String> {
        let nothing_to_run = self.run.command.is_empty() && self.run.shell.is_none();
        match self.instead {
            Some(wanted) => Ok(wanted),
            None if nothing_to_run && self.forget => Ok(Wanted::Forget),
            None if nothing_to_run => Err("there is no command".to_owned()),
            None => Ok(Wanted::Run(self.run)),
        }
    }
}

fn takes_value(letter: char) -> bool {
    matches!(letter, 'u' | 'p')
}

/// `NAME=value`, if it is that.
fn assignment(word: &str) -> Option<(String, String)> {
    let (name, value) = word.split_once('=')?;
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let begins = name.bytes().next().is_some_and(|byte| !byte.is_ascii_digit());
    (plain && begins).then(|| (name.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Wanted, String> {
        parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn run(line: &str) -> Run {
        match parsed(line) {
            Ok(Wanted::Run(run)) => run,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn words_after_the_command_are_its_own() {
        let run = run("-n apt-get -u install -E A=b -- x");
        assert_eq!(run.command, ["apt-get", "-u", "install", "-E", "A=b", "--", "x"]);
        assert_eq!((run.user, run.keep, run.assignments), (None, Keep::Usual, Vec::new()));
    }

    #[test]
    fn a_user_is_named_in_every_usual_way() {
        for line in
            ["-u bob id", "-ubob id", "-nu bob id", "-Hnubob id", "--user=bob id", "--user bob id"]
        {
            let run = run(line);
            assert_eq!((run.user.as_deref(), run.command.len()), (Some("bob"), 1), "{line}");
        }
        assert_eq!(run("-u #1000 id").user.as_deref(), Some("1000"));
    }

    #[test]
    fn assignments_stand_before_the_command() {
        let env = run("A=1 -E B_2=x=y -- C= env D=4");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(env.assignments, [pair("A", "1"), pair("B_2", "x=y"), pair("C", "")]);
        assert_eq!(env.command, ["env", "D=4"]);
        assert_eq!(run("./a=b").command, ["./a=b"]);
        assert_eq!(run("2=b").command, ["2=b"]);
    }

    #[test]
    fn the_environment_is_kept_as_asked() {
        assert_eq!(run("-E id").keep, Keep::All);
        assert_eq!(run("--preserve-env id").keep, Keep::All);
        let named = Keep::Named(vec!["A".to_owned(), "B".to_owned(), "C".to_owned()]);
        assert_eq!(run("--preserve-env=A,B --preserve-env=C id").keep, named);
    }

    #[test]
    fn a_shell_needs_no_command() {
        assert_eq!(run("-i").shell, Some(Shell::Login));
        assert_eq!(run("-s -u bob").shell, Some(Shell::Plain));
        assert_eq!(run("-iu bob ls -l").command, ["ls", "-l"]);
    }

    #[test]
    fn what_needs_no_process_is_told_apart() {
        for (line, wanted) in [
            ("-l", Wanted::List),
            ("-nl ls", Wanted::List),
            ("-v", Wanted::Validate),
            ("-k", Wanted::Forget),
            ("-K", Wanted::Forget),
            ("--version", Wanted::Version),
            ("-h", Wanted::Help),
        ] {
            assert_eq!(parsed(line), Ok(wanted), "{line}");
        }
        assert_eq!(run("-k -S -p x id").command, ["id"]);
    }

    #[test]
    fn a_mistake_is_named() {
        for (line, words) in [
            ("-x id", "invalid option -- 'x'"),
            ("-nö id", "invalid option -- 'ö'"),
            ("--frob id", "unrecognized option '--frob'"),
            ("--login=x id", "option '--login' takes no argument"),
            ("-u", "option requires an argument -- 'u'"),
            ("--user", "option '--user' requires an argument"),
            ("", "there is no command"),
            ("-E A=b", "there is no command"),
        ] {
            assert_eq!(parsed(line), Err(words.to_owned()), "{line}");
        }
    }
}
