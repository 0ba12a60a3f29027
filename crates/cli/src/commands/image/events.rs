//! How an image comes to be, line by line: steps and their output on standard error, the image's
//! name on standard output.

use torpor_client::{Error, Lines};
use torpor_protocol::api::{Image, ImageEvent};

use crate::error::Result;
use crate::output::{self, plain, plain_lines};
use crate::progress::Progress;

/// Follows the events to the image, or to the error.
pub(super) async fn follow(mut events: Lines<ImageEvent>) -> Result<Image> {
    let mut progress = Progress::waiting("waiting for the daemon");
    let mut measured = false;
    while let Some(event) = events.next().await? {
        match event {
            ImageEvent::Step { number, of, text } => {
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
            ImageEvent::Done { image } => return Ok(image),
            ImageEvent::Error { error } => {
                return Err(Error::refused(error).into());
            }
        }
    }
    let what = "the daemon broke off before the image was done".to_owned();
    Err(Error::Garbled { what, why: None }.into())
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
