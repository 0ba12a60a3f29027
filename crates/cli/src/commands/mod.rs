//! The verbs: one file each. A verb is a struct of its arguments with `run`; what it prints to
//! standard output is its result.

mod attach;
mod base;
mod bench;
mod cat;
mod completions;
mod cp;
mod create;
mod doctor;
mod domain;
mod egress;
mod ended;
mod engine;
mod enter;
mod exec;
mod fork;
mod host;
mod image;
mod inspect;
mod jail;
mod keeper;
mod kernel;
mod key;
mod kill;
mod logs;
mod ls;
mod map;
mod output;
mod policy;
mod pool;
mod port_forward;
mod preview;
mod process;
mod processes;
mod ps;
mod purge;
mod queue;
mod reach;
mod restore;
mod rm;
mod run;
mod sandboxes;
mod secret;
mod serve;
mod sleep;
mod snapshot;
mod supervision;
mod top;
mod update;
mod version;
mod wake;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use torpor_protocol::Name;

use crate::client::{Client, Server};
use crate::error::{Error, Result, Subject};
use crate::{similar, units};

/// Sandboxes for AI agents, on your own computers.
#[derive(Debug, Parser)]
#[command(name = "torpor", version, disable_help_subcommand = true, arg_required_else_help = true)]
#[command(after_help = "Start with:\n  torpor serve                      in one terminal\n  \
    torpor create --name web          in another\n  torpor run web -- uname -a\n  \
    torpor exec -it web bash")]
pub(crate) struct Cli {
    #[command(flatten)]
    connection: Connection,
    /// Say more about errors: the id under which the daemon logged the request.
    #[arg(short, long, global = true)]
    pub verbose: bool,
    #[command(subcommand)]
    command: Command,
}

/// Which daemon to talk to.
#[derive(Debug, Clone, Args)]
pub(crate) struct Connection {
    /// Address of the daemon.
    #[arg(
        long,
        global = true,
        env = "TORPOR_SERVER",
        value_name = "URL",
        hide_env_values = true,
        default_value = "http://127.0.0.1:8900"
    )]
    server: Server,
    /// Key for the daemon's API, if it needs one.
    #[arg(long, global = true, env = "TORPOR_API_KEY", value_name = "KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Certificates (PEM) that are believed besides those of this computer, for https addresses.
    #[arg(
        long,
        global = true,
        env = "TORPOR_CA_FILE",
        value_name = "FILE",
        hide_env_values = true
    )]
    ca_file: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Serve),
    Doctor(doctor::Doctor),
    Create(create::Create),
    Run(run::Run),
    Exec(exec::Exec),
    Attach(attach::Attach),
    Cp(cp::Cp),
    Ls(ls::Ls),
    Cat(cat::Cat),
    Ps(ps::Ps),
    Inspect(inspect::Inspect),
    Logs(logs::Logs),
    Output(output::Output),
    Processes(processes::Processes),
    Kill(kill::Kill),
    Update(update::Update),
    Rm(rm::Rm),
    Sleep(sleep::Sleep),
    Wake(wake::Wake),
    Snapshot(snapshot::Snapshot),
    Fork(fork::Fork),
    Restore(restore::Restore),
    Map(map::Map),
    Top(top::Top),
    Pool(pool::Pool),
    PortForward(port_forward::PortForward),
    Preview(preview::Preview),
    Image(image::Image),
    Domain(domain::Domain),
    Secret(secret::Secret),
    Egress(egress::Egress),
    Key(key::Key),
    Kernel(kernel::Kernel),
    Engine(engine::Engine),
    Bench(bench::Bench),
    Completions(completions::Completions),
    Version(version::Version),
    #[command(hide = true)]
    Purge(purge::Purge),
    #[command(hide = true)]
    Keeper(keeper::Keeper),
    #[command(hide = true)]
    Jail(jail::Jail),
    #[command(hide = true)]
    Enter(enter::Enter),
}

impl Cli {
    /// Does what was asked for; an error is for the caller to show.
    pub(crate) fn run(self) -> Result<ExitCode> {
        let Connection { server, api_key, ca_file } = self.connection;
        let client = || Client::believing(server, api_key.as_deref(), ca_file.as_deref());
        match self.command {
            Command::Serve(verb) => verb.run(),
            Command::Doctor(verb) => verb.run(),
            Command::Create(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Run(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Exec(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Attach(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Cp(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Ls(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Cat(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Ps(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Inspect(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Logs(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Output(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Processes(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Kill(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Update(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Sleep(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Wake(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Snapshot(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Fork(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Restore(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Map(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Top(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Pool(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Rm(verb) => online(client()?, async |client| verb.run(client).await),
            Command::PortForward(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Preview(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Image(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Domain(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Secret(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Egress(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Key(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Bench(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Kernel(verb) => verb.run(),
            Command::Engine(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Completions(verb) => verb.run(),
            Command::Purge(verb) => verb.run(),
            Command::Keeper(verb) => verb.run(),
            Command::Jail(verb) => verb.run(),
            Command::Enter(verb) => verb.run(),
            Command::Version(verb) => online(client()?, async |client| verb.run(client).await),
        }
    }
}

/// Runs a verb of the client: one thread is enough for it.
fn online(client: Client, verb: impl AsyncFnOnce(&Client) -> Result<ExitCode>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::local("start", error))?;
    let result = runtime.block_on(Box::pin(async {
        match verb(&client).await {
            Err(error) => Err(suggest(&client, error).await),
            done @ Ok(_) => done,
        }
    }));
    // A thread may still sit in a read of our standard input; it must not keep us.
    runtime.shutdown_background();
    result
}

/// Names the sandbox or snapshot that may have been meant.
async fn suggest(client: &Client, error: Error) -> Error {
    let Some(missing) = error.missing().cloned() else { return error };
    // Whatever goes wrong now is not what the user asked about.
    let (wanted, names): (String, Vec<Option<Name>>) = match missing {
        Subject::Sandbox(wanted) => {
            if let Some(ended) = ended::last_called(client, &wanted).await {
                let when = units::show_time(ended.ended_at_ms);
                let hint = format!("one of that name ended at {when}: torpor inspect {}", ended.id);
                return error.with_hint(hint);
            }
            let Ok(statuses) = sandboxes::list(client, &[], None).await else { return error };
            (wanted, statuses.into_iter().map(|status| status.spec.name).collect())
        }
        Subject::Snapshot(wanted) => {
            let Ok(list) = snapshot::list(client, None).await else { return error };
            (wanted, list.snapshots.into_iter().map(|taken| taken.name).collect())
        }
    };
    match similar::nearest(&wanted, names.iter().flatten().map(Name::as_str)) {
        Some(name) => error.with_hint(format!("did you mean {name}?")),
        None => error,
    }
}

/// Text such as `key=value`.
fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("it is written KEY=VALUE".to_owned()),
    }
}

/// An environment variable: `KEY=VALUE`, or `KEY` to pass on our own.
fn parse_env(text: &str) -> Result<(String, String), String> {
    if text.contains('=') || text.is_empty() {
        return parse_pair(text);
    }
    match std::env::var(text) {
        Ok(value) => Ok((text.to_owned(), value)),
        Err(_) => Err(format!("write {text}=VALUE, or set {text} here to pass it on")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_number_of_a_fork_survives_the_help_text() {
        for verb in ["fork", "map"] {
            let mut root = Cli::command();
            root.build();
            let help = root.find_subcommand_mut(verb).unwrap().render_long_help().to_string();
            let examples = help.split("Examples:").nth(1).unwrap();
            assert!(examples.contains("{n}"), "{help}");
            assert!(help.contains("{n} is the number of each"), "{help}");
        }
    }

    #[test]
    fn pairs_need_a_key() {
        assert_eq!(parse_pair("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert_eq!(parse_pair("a="), Ok(("a".into(), String::new())));
        assert!(parse_pair("=b").is_err());
        assert!(parse_pair("a").is_err());
    }

    #[test]
    fn options_after_the_command_belong_to_the_command() {
        let parse = |words: &str| Cli::try_parse_from(words.split(' ')).unwrap().command;
        let Command::Run(run) = parse("torpor run web -e A=1 ls -l -e") else { panic!() };
        assert_eq!(run.command, ["ls", "-l", "-e"]);
        let Command::Run(run) = parse("torpor run -d web -- -x --name y") else { panic!() };
        assert_eq!(run.command, ["-x", "--name", "y"]);
    }
}
