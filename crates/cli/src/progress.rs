//! Signs of life for whatever takes longer than a second: on standard error, if that is a terminal.

use std::collections::HashMap;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::task::JoinHandle;

/// What is over sooner needs no sign of life.
const QUIET_FOR: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(120);

/// A line that shows itself after [`QUIET_FOR`] and goes when dropped.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    show: JoinHandle<()>,
}

impl Progress {
    /// Something whose end is not known.
    pub(crate) fn waiting(text: impl Into<String>) -> Self {
        Self::new(ProgressBar::hidden(), "{spinner} {msg} ({elapsed})", text.into())
    }

    /// So many bytes to be moved; None: nobody knows how many.
    pub(crate) fn bytes(total: Option<u64>, text: impl Into<String>) -> Self {
        match total {
            Some(total) => Self::new(
                ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden()),
                "{msg}  {bytes} of {total_bytes}  [{bar:24}]  {bytes_per_sec}  {eta} left",
                text.into(),
            ),
            None => Self::new(
                ProgressBar::hidden(),
                "{spinner} {msg}  {bytes}  {bytes_per_sec}",
                text.into(),
            ),
        }
    }

    /// So many things to be done.
    pub(crate) fn count(total: u64, text: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        Self::new(bar, "{msg}  [{bar:24}] {pos} of {len}  ({elapsed})", text.into())
    }

    /// Something in hundredths.
    pub(crate) fn percent(text: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(Some(100), ProgressDrawTarget::hidden());
        Self::new(bar, "{msg}  [{bar:24}] {percent}%  ({elapsed})", text.into())
    }

    fn new(bar: ProgressBar, template: &'static str, text: String) -> Self {
        let style = ProgressStyle::with_template(template).expect("our own templates are valid");
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(text);
        let later = bar.clone();
        let show = tokio::spawn(async move {
            tokio::time::sleep(QUIET_FOR).await;
            // Hides itself if standard error is no terminal.
            later.set_draw_target(ProgressDrawTarget::stderr());
            later.enable_steady_tick(TICK);
        });
        Self { bar, show }
    }

    /// To be called from anywhere with the number of bytes that went.
    pub(crate) fn counter(&self) -> impl Fn(usize) + Send + 'static {
        let bar = self.bar.clone();
        move |bytes| bar.inc(bytes as u64)
    }

    pub(crate) fn set(&self, position: u64, text: String) {
        self.bar.set_position(position);
        self.bar.set_message(text);
    }

    pub(crate) fn say(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Prints something else without tearing the bar.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Prints a line to standard error without tearing the bar.
    pub(crate) fn note(&self, text: &str) {
        self.bar.suspend(|| crate::output::note(text));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show.abort();
        self.bar.finish_and_clear();
    }
}

/// How much of what is shown of a digest.
const DIGEST_SHOWN: usize = 19;

/// One bar for each layer of an image; they go when dropped.
#[derive(Debug, Default)]
pub(crate) struct Bars {
    /// Hides itself if standard error is no terminal.
    all: MultiProgress,
    layers: HashMap<String, ProgressBar>,
}

impl Bars {
    pub(crate) fn set(&mut self, digest: &str, bytes: u64, total: u64) {
        let new = || {
            let template = "{msg}  [{bar:24}] {bytes} of {total_bytes}  {bytes_per_sec}";
            let style =
                ProgressStyle::with_template(template).expect("our own templates are valid");
            let bar = self.all.add(ProgressBar::new(total));
            bar.set_style(style.progress_chars("=> "));
            bar.set_message(digest.chars().take(DIGEST_SHOWN).collect::<String>());
            bar
        };
        self.layers.entry(digest.to_owned()).or_insert_with(new).set_position(bytes);
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.layers.values().for_each(ProgressBar::finish_and_clear);
    }
}
