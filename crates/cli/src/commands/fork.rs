//! `torpor fork`

use std::process::ExitCode;

use clap::Args;
use tokio::time::Instant;
use torpor_client::Client;
use torpor_protocol::snapshot::{FORKS_MAX, Fork as Request, ForkList, ForkOutcome};
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{ErrorBody, Lifetime, Network};

use super::base::{Base, BaseArgs};
use super::policy::{LifetimeArgs, StandbyArgs};
use super::{parse_env, parse_pair, sandboxes, volume};
use crate::error::{EXIT_FAILED, Error, Result};
use crate::progress::Progress;
use crate::{output, units};

/// The place of a fork's number in a name or an argument.
pub(super) const NUMBER: &str = "{n}";

/// Create sandboxes from a snapshot, or from a sandbox as it is now, and print their names or ids.
///
/// Each has the files, and of a memory snapshot the memory and the processes, and goes its own way
/// from there: own id, name, hostname, address and entropy. Some may fail while the others live;
/// then it exits with 1.
#[derive(Debug, Args)]
// An escape keeps clap from taking the braces for a line end.
#[command(after_help = "Examples:\n  torpor fork base --count 5 --name agent-{\x1b[0mn}\n  \
    torpor fork web --env ROLE=reviewer")]
pub(super) struct Fork {
    #[command(flatten)]
    base: BaseArgs,
    /// How many.
    #[arg(short = 'n', long, default_value = "1", value_parser = parse_count)]
    count: usize,
    #[arg(
        long,
        help = "What to call them; {\x1b[0mn} is the number of each, from 1",
        value_name = "NAME"
    )]
    name: Option<String>,
    /// Environment variable for processes started later; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Label to find them by.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Processor cores, of a filesystem snapshot [default: as they were].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    cpus: Option<f64>,
    /// Memory, of a filesystem snapshot [default: as it was].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    memory: Option<u64>,
    /// Disk, of a filesystem snapshot [default: as it was].
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    disk: Option<u64>,
    /// Let them reach nothing outside.
    #[arg(long)]
    no_internet: bool,
    /// What becomes of its volumes: copy, share-ro or refuse; drives are shared.
    #[arg(long, value_name = "HOW", default_value = "refuse", value_parser = volume::parse_fork)]
    volumes: ForkVolumes,
    #[command(flatten)]
    standby: StandbyArgs,
    #[command(flatten)]
    lifetime: LifetimeArgs,
    /// Print all about them as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=FORKS_MAX) => Ok(count),
        Ok(_) | Err(_) => Err(format!("it is a number from 1 to {FORKS_MAX}")),
    }
}

/// Several need several names.
pub(super) fn check_name(name: Option<&str>, count: usize) -> Result<()> {
    match name {
        Some(name) if count > 1 && !name.contains(NUMBER) => Err(Error::Usage {
            message: format!("{count} forks can't all be called {name}"),
            hint: Some(format!("--name {name}-{NUMBER} numbers them")),
        }),
        Some(_) | None => Ok(()),
    }
}

impl Fork {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        check_name(self.name.as_deref(), self.count)?;
        let json = self.json;
        let base = self.base.clone().find(client).await?;
        let started = Instant::now();
        let list = fork(client, &base, &self.request()).await?;
        let took = started.elapsed().as_secs_f64() * 1000.0;
        match json {
            true => output::json(&list)?,
            false => report(&list, took)?,
        }
        let failed = list.forks.iter().any(|fork| fork.error.is_some());
        Ok(if failed { ExitCode::from(EXIT_FAILED) } else { ExitCode::SUCCESS })
    }

    fn request(self) -> Request {
        Request {
            count: self.count,
            name: self.name,
            env: self.env.into_iter().collect(),
            labels: self.label.into_iter().collect(),
            network: self.no_internet.then_some(Network::CLOSED),
            lifetime: self.lifetime.over(Lifetime::default()),
            standby: self.standby.standby(),
            cpus: self.cpus,
            memory_mib: self.memory,
            disk_mib: self.disk,
            volumes: self.volumes,
        }
    }
}

pub(super) async fn fork(client: &Client, base: &Base, request: &Request) -> Result<ForkList> {
    let what = match request.count {
        1 => "a fork".to_owned(),
        count => format!("{count} forks"),
    };
    let _progress = Progress::waiting(format!("making {what} of {}", base.title()));
    Ok(client.post(&base.fork_route(), request).await?)
}

/// Those that live on standard output, those that do not on standard error.
fn report(list: &ForkList, took_ms: f64) -> Result<()> {
    let mut made = 0;
    for (index, fork) in list.forks.iter().enumerate() {
        match fork {
            ForkOutcome { sandbox: Some(status), .. } => {
                made += 1;
                output::line(sandboxes::title(status))?;
            }
            ForkOutcome { sandbox: None, error, .. } => {
                output::note(&format!("fork {}: {}", index + 1, failure(error.as_ref())));
            }
        }
    }
    let took = units::show_millis(took_ms);
    output::note(&format!("{made} of {} in {took}", list.forks.len()));
    Ok(())
}

/// Why a fork is not there, as errors are shown.
pub(super) fn failure(error: Option<&ErrorBody>) -> String {
    match error {
        Some(body) => {
            let error = Error::from(torpor_client::Error::refused(body.clone()));
            error.render(false).trim_end().to_owned()
        }
        None => "error: the daemon does not say what became of it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_forks_need_several_names() {
        assert!(check_name(Some("agent"), 2).is_err());
        for (name, count) in [(Some("agent-{n}"), 2), (Some("agent"), 1), (None, 2)] {
            assert!(check_name(name, count).is_ok(), "{name:?} {count}");
        }
    }

    #[test]
    fn a_count_has_bounds() {
        assert_eq!(parse_count("1000"), Ok(1000));
        for text in ["0", "1001", "-1", "x", ""] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }
}
