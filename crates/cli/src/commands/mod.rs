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
mod events;
mod exec;
mod fork;
mod gateway;
mod host;
mod image;
mod inspect;
mod jail;
mod job;
mod keeper;
mod kernel;
mod key;
mod kill;
mod logs;
mod ls;
mod map;
mod mcp;
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
mod registry;
mod removal;
mod restore;
mod rm;
mod run;
mod sandboxes;
mod schedule;
mod secret;
mod serve;
mod service;
mod sleep;
mod snapshot;
mod supervision;
mod top;
mod update;
mod version;
mod volume;
mod wake;
mod webhook;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use futures_util::future::LocalBoxFuture;
use torpor_client::{Client, Server, Subject};
use torpor_protocol::{Name, Status};

use crate::error::{Error, Result};
use crate::{similar, units};

/// Perpetual sandboxes for AI agents, self-hosted.
#[derive(Debug, Parser)]
#[command(name = "torpor", version, disable_help_subcommand = true, arg_required_else_help = true)]
#[command(after_help = "Start with:\n  torpor serve                      in one terminal\n  \
    torpor create --name web          in another\n  torpor run web -- uname -a\n  \
    torpor exec -it web bash")]
pub(crate) struct Cli {
    #[command(flatten)]
    connection: Connection,
    /// Show the request id with errors.
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
    /// API key of the daemon.
    #[arg(long, global = true, env = "TORPOR_API_KEY", value_name = "KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Extra CA certificates to trust (PEM).
    #[arg(
        long,
        global = true,
        env = "TORPOR_CA_FILE",
        value_name = "FILE",
        hide_env_values = true
    )]
    ca_file: Option<PathBuf>,
}

/// Verbs that talk to no daemon: their help does not show how to reach one.
const OFFLINE: [&str; 5] = ["serve", "doctor", "kernel", "completions", "purge"];

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
    Mcp(mcp::Mcp),
    Top(top::Top),
    Job(job::Job),
    Pool(pool::Pool),
    PortForward(port_forward::PortForward),
    Preview(preview::Preview),
    Image(image::Image),
    Registry(registry::Registry),
    Volume(volume::Volume),
    Drive(volume::Drive),
    Domain(domain::Domain),
    Service(service::Service),
    Secret(secret::Secret),
    Egress(egress::Egress),
    Gateway(gateway::Gateway),
    Events(events::Events),
    Webhook(webhook::Webhook),
    Schedule(schedule::Schedule),
    Key(key::Key),
    Kernel(kernel::Kernel),
    Engine(engine::Engine),
    Bench(torpor_bench::Bench),
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
    /// All verbs and options, as the help shows them.
    pub(crate) fn definition() -> clap::Command {
        let connection = Connection::augment_args(clap::Command::new("connection"));
        let hidden = || connection.get_arguments().map(|option| option.clone().hide(true));
        // A verb's own option goes before the global one of that name.
        Self::command().mut_subcommands(|verb| match OFFLINE.contains(&verb.get_name()) {
            true => verb.args(hidden()),
            // Here -v is a volume, as everybody knows it.
            false if verb.get_name() == "create" => verb.arg(long_verbose()),
            false => verb,
        })
    }

    pub(crate) fn parse_arguments(
        arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let mut matches = Self::definition().try_get_matches_from(arguments)?;
        Self::from_arg_matches_mut(&mut matches)
    }

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
            Command::Mcp(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Top(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Job(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Pool(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Rm(verb) => online(client()?, async |client| verb.run(client).await),
            Command::PortForward(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Preview(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Image(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Registry(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Volume(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Drive(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Domain(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Service(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Secret(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Egress(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Gateway(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Events(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Schedule(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Webhook(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Key(verb) => online(client()?, async |client| verb.run(client).await),
            Command::Bench(verb) => {
                online(client()?, async |client| bench::run(verb, client).await)
            }
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

/// The global option, without its letter.
fn long_verbose() -> clap::Arg {
    let action = clap::ArgAction::SetTrue;
    clap::Arg::new("verbose").long("verbose").help("Show the request id with errors").action(action)
}

/// Runs a verb of the client: one thread is enough for it.
fn online(client: Client, verb: impl AsyncFnOnce(&Client) -> Result<ExitCode>) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::local("start", error))?;
    let work: LocalBoxFuture<'_, Result<ExitCode>> = Box::pin(async {
        match verb(&client).await {
            Err(Error::Client(error)) => Err(suggest(&client, error).await.into()),
            done => done,
        }
    });
    let result = runtime.block_on(work);
    // A thread may still sit in a read of our standard input; it must not keep us.
    runtime.shutdown_background();
    result
}

/// Names the sandbox or snapshot that may have been meant.
async fn suggest(client: &Client, error: torpor_client::Error) -> torpor_client::Error {
    let Some(missing) = error.missing().cloned() else { return error };
    // Whatever goes wrong now is not what the user asked about.
    let (wanted, names): (String, Vec<Option<Name>>) = match missing {
        Subject::Sandbox(wanted) => {
            if let Some(ended) = ended::last_called(client, &wanted).await {
                let when = units::show_time(ended.ended_at_ms);
                let hint = format!("one of that name ended at {when}: torpor inspect {}", ended.id);
                return error.with_hint(hint);
            }
            let statuses: Result<Vec<Status>, _> = client.sandboxes(&[], None).await;
            let Ok(statuses) = statuses else { return error };
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

    fn parse(words: &str) -> Cli {
        Cli::parse_arguments(words.split(' ')).unwrap()
    }

    fn help(verb: &str) -> String {
        let mut root = Cli::definition();
        root.build();
        root.find_subcommand_mut(verb).unwrap().render_long_help().to_string()
    }

    #[test]
    fn the_definitions_fit_together() {
        Cli::definition().debug_assert();
    }

    #[test]
    fn a_verb_without_a_daemon_does_not_show_how_to_reach_one() {
        for verb in OFFLINE {
            assert!(!help(verb).contains("--server") && help(verb).contains("--verbose"), "{verb}");
        }
        let mut fetch = Cli::definition();
        fetch.build();
        let fetch = fetch.find_subcommand_mut("kernel").unwrap().find_subcommand_mut("fetch");
        assert!(!fetch.unwrap().render_long_help().to_string().contains("--api-key"));
        assert!(help("ps").contains("--ca-file") && help("bench").contains("--server"));
    }

    #[test]
    fn how_to_reach_the_daemon_may_be_said_before_or_after_the_verb() {
        let given = [
            "torpor --server h:1 --api-key k ps",
            "torpor ps --server h:1 --api-key k",
            "torpor --api-key k image ls --server h:1",
            "torpor --server h:1 --api-key k serve",
            "torpor kernel fetch --server h:1 --api-key k",
        ];
        for words in given {
            let connection = parse(words).connection;
            assert_eq!(connection.server.to_string(), "http://h:1", "{words}");
            assert_eq!(connection.api_key.as_deref(), Some("k"), "{words}");
        }
    }

    #[test]
    fn the_number_of_a_fork_survives_the_help_text() {
        for verb in ["fork", "map"] {
            let help = help(verb);
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
        let Command::Run(run) = parse("torpor run web -e A=1 ls -l -e").command else { panic!() };
        assert_eq!(run.command, ["ls", "-l", "-e"]);
        let Command::Run(run) = parse("torpor run -d web -- -x --name y").command else { panic!() };
        assert_eq!(run.command, ["-x", "--name", "y"]);
    }
}
