//! A build, step by step, on standard error: on a terminal one line a step with the last words of the one
//! that runs; elsewhere everything that is said, under the number of its step.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::ValueEnum;
use tokio::time::Instant;
use torpor_client::{Error, Lines};
use torpor_protocol::api::{Image, ImageEvent};

use crate::error::Result;
use crate::output::{note, plain, plain_lines};
use crate::progress::Progress;
use crate::units;

/// Last lines of a step that are shown if it fails, where its output was not.
const TAIL_LINES: usize = 40;

/// How a build is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::commands) enum Style {
    /// `plain` unless standard error is a terminal.
    Auto,
    /// Everything that is said, line by line.
    Plain,
    /// The events as they come, one a line.
    Json,
}

/// Follows the events to the image, or to the error.
pub(super) async fn follow(mut events: Lines<ImageEvent>, style: Style) -> Result<Image> {
    let mut shown = Shown::new(style);
    while let Some(event) = events.next().await? {
        if style == Style::Json {
            let line = serde_json::to_string(&event);
            note(&line.map_err(|error| Error::garbled("an event", error))?);
        }
        match event {
            ImageEvent::Step { number, of, text, stage, cached } => {
                let stage = stage.map(|stage| format!("{} ", plain(&stage))).unwrap_or_default();
                shown.step(format!("[{stage}{number}/{of}] {}", plain(&text)), cached);
            }
            ImageEvent::Output { text } => shown.output(&plain_lines(&text)),
            ImageEvent::Progress { percent, text } => shown.progress(percent, &plain(&text)),
            ImageEvent::Layer { digest, bytes, total_bytes } => {
                shown.layer(digest, bytes, total_bytes);
            }
            // No build pushes.
            ImageEvent::Pushed { .. } => {}
            ImageEvent::Done { image } => {
                shown.end_step();
                return Ok(image);
            }
            ImageEvent::Error { error } => {
                shown.failed();
                return Err(Error::refused(error).into());
            }
        }
    }
    let what = "the daemon broke off before the image was done".to_owned();
    Err(Error::Garbled { what, why: None }.into())
}

struct Shown {
    look: Look,
    number: u32,
    step: Option<Step>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Live,
    Plain,
    Silent,
}

/// The step that runs.
struct Step {
    title: String,
    begun: Instant,
    bar: Progress,
    tail: Vec<String>,
    /// The beginning of a line.
    begun_line: String,
    /// Bytes that are here, and bytes in all, of the layers that it pulls.
    layers: BTreeMap<String, (u64, u64)>,
}

impl Shown {
    fn new(style: Style) -> Self {
        let look = match style {
            Style::Auto if std::io::stderr().is_terminal() => Look::Live,
            Style::Auto | Style::Plain => Look::Plain,
            Style::Json => Look::Silent,
        };
        Self { look, number: 0, step: None }
    }

    fn step(&mut self, title: String, cached: bool) {
        self.end_step();
        self.number += 1;
        let number = self.number;
        match (self.look, cached) {
            (Look::Live, true) => return note(&format!(" => CACHED {title}")),
            (Look::Plain, true) => {
                note(&format!("#{number} {title}"));
                return note(&format!("#{number} CACHED"));
            }
            (Look::Silent, true) => return,
            (Look::Plain, false) => note(&format!("#{number} {title}")),
            (Look::Live | Look::Silent, false) => {}
        }
        let bar = Progress::waiting(format!("=> {title}"));
        let (begun, tail) = (Instant::now(), Vec::new());
        let (begun_line, layers) = (String::new(), BTreeMap::new());
        self.step = Some(Step { title, begun, bar, tail, begun_line, layers });
    }

    /// The step that ran is done.
    fn end_step(&mut self) {
        let Some(mut step) = self.step.take() else { return };
        let rest = std::mem::take(&mut step.begun_line);
        let (took, title) = (seconds(step.begun.elapsed()), &step.title);
        match self.look {
            Look::Live => step.bar.note(&format!(" => {title}  {took}")),
            Look::Plain => {
                if !rest.is_empty() {
                    step.bar.note(&format!("#{} {took} {rest}", self.number));
                }
                step.bar.note(&format!("#{} DONE {took}", self.number));
            }
            Look::Silent => {}
        }
    }

    fn output(&mut self, text: &str) {
        let (look, number) = (self.look, self.number);
        let Some(step) = &mut self.step else { return };
        let whole = std::mem::take(&mut step.begun_line) + text;
        for line in whole.split_inclusive('\n') {
            let Some(line) = line.strip_suffix('\n') else {
                step.begun_line = line.to_owned();
                continue;
            };
            match look {
                Look::Plain => {
                    let at = seconds(step.begun.elapsed());
                    step.bar.note(&format!("#{number} {at} {line}"));
                }
                Look::Live => {
                    let line = line.trim_end_matches('\r');
                    step.bar.say(format!("=> {}  {line:.80}", step.title));
                    if step.tail.len() == TAIL_LINES {
                        step.tail.remove(0);
                    }
                    step.tail.push(line.to_owned());
                }
                Look::Silent => {}
            }
        }
    }

    fn progress(&mut self, percent: u8, text: &str) {
        if let Some(step) = &self.step {
            let percent = if percent > 0 { format!(" {percent}%") } else { String::new() };
            step.bar.say(format!("=> {}  {text}{percent}", step.title));
        }
    }

    /// How far the layers of an image are, all together.
    fn layer(&mut self, digest: String, bytes: u64, total_bytes: u64) {
        let Some(step) = &mut self.step else { return };
        step.layers.insert(digest, (bytes, total_bytes));
        let (percent, text) = pulling(&step.layers);
        self.progress(percent, &text);
    }

    /// What was said before the step that ran failed.
    fn failed(&mut self) {
        let Some(step) = self.step.take() else { return };
        let (took, title) = (seconds(step.begun.elapsed()), &step.title);
        let rest = Some(&step.begun_line).filter(|rest| !rest.is_empty());
        match self.look {
            Look::Live => {
                step.bar.note(&format!(" => ERROR {title}  {took}"));
                for line in step.tail.iter().chain(rest) {
                    step.bar.note(&format!("    {line}"));
                }
            }
            Look::Plain => {
                if let Some(rest) = rest {
                    step.bar.note(&format!("#{} {took} {rest}", self.number));
                }
                step.bar.note(&format!("#{} ERROR {took}", self.number));
            }
            Look::Silent => {}
        }
    }
}

fn pulling(layers: &BTreeMap<String, (u64, u64)>) -> (u8, String) {
    let sum = |pick: fn(&(u64, u64)) -> u64| layers.values().map(pick).fold(0, u64::saturating_add);
    let (bytes, total) = (sum(|layer| layer.0), sum(|layer| layer.1));
    let percent = u128::from(bytes) * 100 / u128::from(total.max(1));
    let text = format!("pulling {} of {}", units::show_bytes(bytes), units::show_bytes(total));
    (u8::try_from(percent.min(100)).unwrap_or(100), text)
}

fn seconds(took: Duration) -> String {
    format!("{:.1}s", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_shown_together() {
        let mut layers = BTreeMap::from([("a".to_owned(), (512, 1024))]);
        assert_eq!(pulling(&layers).0, 50);
        layers.insert("b".to_owned(), (0, 1024));
        let (percent, text) = pulling(&layers);
        assert_eq!((percent, text.starts_with("pulling 512 B of 2")), (25, true), "{text}");
        layers.insert("c".to_owned(), (u64::MAX, u64::MAX));
        assert_eq!(pulling(&layers).0, 100);
    }
}
