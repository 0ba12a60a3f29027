//! `torpor top`
//!
//! ```text
//!   poller ─▶ list ─┐
//!   keys ───────────┼─▶ watch ─▶ frame ─▶ screen
//!   signals, size ──┘
//! ```

mod frame;

use std::collections::HashMap;
use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use tokio::io::AsyncReadExt;
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc;
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::SandboxId;
use torpor_protocol::snapshot::{SandboxUsage, UsageList};

use self::frame::Meter;
use crate::error::Result;
use crate::output::{self, plain};
use crate::signals::{Signals, listen};
use crate::terminal::{self, Modes};
use crate::units;

/// Quicker than this only the daemon would be busy.
const INTERVAL_MIN: Duration = Duration::from_millis(100);

/// Another screen, so that the shell's is there again afterwards; no cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
const HOME: &str = "\x1b[H";
const LINE_END: &str = "\x1b[K\r\n";
const CLEAR_BELOW: &str = "\x1b[J";

/// Watch what all sandboxes use: state, memory, processor, disk, last use, wakes.
///
/// q or ctrl-c ends it. Without a terminal it prints once. Watching wakes nobody.
#[derive(Debug, Args)]
pub(super) struct Top {
    /// Print once and end.
    #[arg(long)]
    once: bool,
    /// How often to look.
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration, default_value = "1s")]
    interval: Duration,
    /// Print once, as JSON.
    #[arg(long)]
    json: bool,
}

impl Top {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let first = look(client).await?;
        if self.json {
            output::json(&first)?;
        } else if self.once || !io::stdout().is_terminal() {
            let now = units::now_ms();
            output::print(&frame::draw(first.sandboxes, &HashMap::new(), now, None))?;
        } else {
            watch(client, first, self.interval.max(INTERVAL_MIN)).await?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn look(client: &Client) -> Result<UsageList> {
    Ok(client.list(&Route::new("/v1/usage")).await?)
}

/// What is on the screen.
#[derive(Default)]
struct Picture {
    usages: Vec<SandboxUsage>,
    percents: HashMap<SandboxId, f64>,
    meter: Meter,
    /// Why there is nothing newer.
    trouble: Option<String>,
}

impl Picture {
    fn take(&mut self, looked: Result<UsageList>, at: Instant) {
        match looked {
            Ok(list) => {
                self.percents = self.meter.read(&list.sandboxes, at);
                self.usages = list.sandboxes;
                self.trouble = None;
            }
            // A daemon that is restarted is back in a moment.
            Err(error) => self.trouble = Some(plain(&error.to_string())),
        }
    }

    fn draw(&self) -> Result<()> {
        let size = terminal::size();
        let text = frame::draw(self.usages.clone(), &self.percents, units::now_ms(), Some(size));
        let mut screen = HOME.to_owned();
        for (number, line) in text.lines().enumerate() {
            // The line below the summary is empty otherwise.
            match (&self.trouble, number) {
                (Some(trouble), 1) => screen.push_str(&output::cut(trouble, size.cols.into())),
                (Some(_), _) | (None, _) => screen.push_str(line),
            }
            screen.push_str(LINE_END);
        }
        screen.push_str(CLEAR_BELOW);
        output::print(&screen)
    }
}

async fn watch(client: &Client, first: UsageList, interval: Duration) -> Result<()> {
    let (mut resized, mut ended) = (listen(SignalKind::window_change())?, Signals::new()?);
    let mut looks = poll(client.clone(), interval);
    let mut keys = keys();
    let mut picture = Picture::default();
    picture.take(Ok(first), Instant::now());
    let _screen = Screen::enter()?;
    loop {
        picture.draw()?;
        tokio::select! {
            Some((looked, at)) = looks.recv() => picture.take(looked, at),
            _ = resized.recv() => (),
            key = keys.recv() => if key.is_some_and(ends) { return Ok(()) },
            _ = ended.next() => return Ok(()),
        }
    }
}

/// Looks again and again, for as long as somebody takes what it sees.
fn poll(client: Client, interval: Duration) -> mpsc::Receiver<(Result<UsageList>, Instant)> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(interval).await;
            let looked = look(&client).await;
            if sender.send((looked, Instant::now())).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// What is typed. Never ends, also if nothing can be typed.
fn keys() -> mpsc::Receiver<u8> {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut stdin = tokio::io::stdin();
        while terminal::stdin_is_terminal() {
            match stdin.read_u8().await {
                Ok(key) if sender.send(key).await.is_ok() => (),
                Ok(_) | Err(_) => break,
            }
        }
        // The receiver would be told of the end for ever.
        std::future::pending::<()>().await;
        drop(sender);
    });
    receiver
}

/// q, ctrl-c, ctrl-d.
fn ends(key: u8) -> bool {
    matches!(key, b'q' | b'Q' | 3 | 4)
}

/// The terminal is ours while this lives.
struct Screen {
    _raw: Option<Modes>,
}

impl Screen {
    fn enter() -> Result<Self> {
        let screen = Self { _raw: Modes::raw()? };
        output::print(ENTER)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing is left to do if the terminal is gone.
        let _ = output::print(LEAVE);
    }
}
