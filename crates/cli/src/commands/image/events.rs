//! How an image comes to be, line by line: steps and their output on standard error, the image's
//! name on standard output.

use torpor_client::{Error, Lines};
use torpor_protocol::api::{Image, ImageEvent};

use crate::error::Result;
use crate::output::{self, plain, plain_lines};
use crate::progress::{Bars, Progress};

/// Follows the events to the image, or to the error.
pub(super) async fn follow(events: Lines<ImageEvent>) -> Result<Image> {
    match last(events).await? {
        Last::Image(image) => Ok(*image),
        Last::Pushed(_) => Err(broken_off()),
    }
}

/// Follows the events of a push to the digest that the registry has it under.
pub(super) async fn follow_push(events: Lines<ImageEvent>) -> Result<String> {
    match last(events).await? {
        Last::Pushed(reference) => Ok(reference),
        Last::Image(_) => Err(broken_off()),
    }
}

fn broken_off() -> crate::error::Error {
    let what = "the daemon broke off before the image was done".to_owned();
    Error::Garbled { what, why: None }.into()
}

/// How it ended.
enum Last {
    Image(Box<Image>),
    Pushed(String),
}

async fn last(mut events: Lines<ImageEvent>) -> Result<Last> {
    let mut bars = Bars::default();
    let mut progress = Progress::waiting("waiting for the daemon");
    let mut measured = false;
    while let Some(event) = events.next().await? {
        match event {
            ImageEvent::Step { number, of, text, .. } => {
                let text = format!("[{number}/{of}] {}", plain(&text));
                progress.note(&text);
                progress = Progress::waiting(text);
                measured = false;
            }
            ImageEvent::Output { text } => progress.note(plain_lines(&text).trim_end_matches('\n')),
            ImageEvent::Progress { percent, text } => {
                if !measured {
                    progress = Progress::percent("");
                    measured = true;
                }
                progress.set(percent.into(), plain(&text));
            }
            ImageEvent::Layer { digest, bytes, total_bytes } => {
                bars.set(&plain(&digest), bytes, total_bytes);
            }
            ImageEvent::Done { image } => return Ok(Last::Image(Box::new(image))),
            ImageEvent::Pushed { reference } => return Ok(Last::Pushed(reference)),
            ImageEvent::Error { error } => {
                return Err(Error::refused(error).into());
            }
        }
    }
    Err(broken_off())
}

/// What came out of it.
pub(super) fn report(image: &Image, json: bool) -> Result<()> {
    if json {
        return output::json(image);
    }
    match image.names.first() {
        Some(name) => output::line(&plain(name)),
        None => output::line(image.id.as_str()),
    }
}
