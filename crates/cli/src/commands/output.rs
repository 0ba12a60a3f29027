//! `torpor output`

use std::io::{self, Write};
use std::process::ExitCode;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{OutputStream, RunEvent};

use crate::error::{Error, Result};
use crate::output;

/// Show what one process printed, to the byte; its standard error on ours. Wakes the sandbox.
///
/// The newest MiB of each process is kept inside, that of terminals too. `torpor logs` shows the lines of
/// all processes, and wakes nobody.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor output web 7\n  torpor output web app -f")]
pub(super) struct Output {
    /// Name or id.
    sandbox: SandboxRef,
    /// Its id, or its name if it is supervised.
    process: String,
    /// Go on with what is printed from now on, until the process ends.
    #[arg(short, long)]
    follow: bool,
}

impl Output {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let follow = if self.follow { "true" } else { "false" };
        let route = Route::sandbox(&self.sandbox).then("/processes").part(&self.process);
        let route = route.then("/output").query("follow", follow);
        let mut events = client.lines(Method::GET, &route, body::empty()).await?;
        while let Some(event) = events.next().await? {
            show(event)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn show(event: RunEvent) -> Result<()> {
    match event {
        RunEvent::Started { .. } | RunEvent::Exited { .. } => Ok(()),
        RunEvent::Output { stream, text, base64 } => {
            let bytes = decode(text, base64)?;
            let written = match stream {
                OutputStream::Stdout => put(&mut io::stdout().lock(), &bytes),
                OutputStream::Stderr => put(&mut io::stderr().lock(), &bytes),
            };
            written.map_err(|error| Error::local("write the output", error))
        }
        RunEvent::Skipped { bytes } => {
            output::note(&format!("torpor: {bytes} bytes of output are not kept any more"));
            Ok(())
        }
        RunEvent::Error { message } => Err(Error::failed(message)),
    }
}

fn decode(text: Option<String>, base64: Option<String>) -> Result<Vec<u8>> {
    match (text, base64) {
        (Some(text), _) => Ok(text.into_bytes()),
        (None, Some(base64)) => BASE64_STANDARD
            .decode(base64)
            .map_err(|error| Error::garbled("can't read the daemon's answer", error)),
        (None, None) => Ok(Vec::new()),
    }
}

fn put(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}
