//! Whether the time of a refusal tells how much of a key or a token was right, on a daemon of its own.
//!
//! As in dudect (Reparaz, Balasch, Verbauwhede: "dude, is my code constant time?"): guesses of several
//! kinds in random order over one connection, and Welch's t-test between kinds, of all times and of those
//! below several percentiles, because what disturbs a machine makes requests slow. Guesses have the
//! same length and get the same answer.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;
use torpor_client::Route;
use torpor_protocol::api::{ApiKey, CreateKey};
use torpor_protocol::preview::{
    CreatePreview, CreatePreviewToken, Preview, PreviewToken, TOKEN_HEADER,
};

use crate::Bench;
use crate::error::{Error, Result};
use crate::home::{Daemon, Home, fresh_key};
use crate::load::SplitMix;
use crate::report::Report;

/// Guesses of each kind.
const GUESSES: usize = 20_000;
const QUICK_GUESSES: usize = 2_000;
/// Requests before the first one that counts.
const WARM_UP: usize = 500;
/// From here on times are taken for different.
const LIMIT: f64 = 4.5;
/// Shares of the fastest times that are compared.
const CROPS: [f64; 6] = [1.0, 0.99, 0.95, 0.9, 0.75, 0.5];
/// `tpk_`, `tpv_`: no secret.
const PREFIX: usize = 4;
const PORT: std::num::NonZeroU16 = std::num::NonZeroU16::new(8000).expect("it is not 0");

/// How a wrong text relates to the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Guess {
    /// Another one each time.
    Random,
    /// No character is right.
    Far,
    /// All but the last one are right.
    Near,
}

const GUESSED: [Guess; 3] = [Guess::Random, Guess::Far, Guess::Near];

/// Something that asks for a secret.
struct Door {
    name: &'static str,
    secret: String,
    /// A request up to the secret.
    head: String,
    /// Microseconds of refusals, by [`GUESSED`].
    times: [Vec<f64>; 3],
}

impl Door {
    fn new(name: &'static str, secret: String, head: String) -> Self {
        Self { name, secret, head, times: Default::default() }
    }

    fn request(&self, guess: Guess, random: &mut SplitMix) -> Vec<u8> {
        let (prefix, digits) = self.secret.split_at(PREFIX);
        let last = digits.len() - 1;
        let wrong = |(at, digit): (usize, char)| {
            let value = digit.to_digit(16).unwrap_or(0);
            let drawn = random.draw();
            let value = match guess {
                Guess::Random => drawn % 16,
                Guess::Far => (value + 8) % 16,
                Guess::Near if at == last => (value + 8) % 16,
                Guess::Near => value,
            };
            char::from_digit(value, 16).unwrap_or('0')
        };
        let digits: String = digits.chars().enumerate().map(wrong).collect();
        format!("{}{prefix}{digits}\r\n\r\n", self.head).into_bytes()
    }

    fn report(&self, report: &mut Report) {
        let [random, far, near] = &self.times;
        for (other, name) in [(far, "none"), (random, "chance")] {
            let name = format!("{}: |t|, all but one character right against {name}", self.name);
            report.at_most(&name, difference(near, other), LIMIT, "");
        }
        let mean = far.iter().sum::<f64>() / length(far);
        report.figure(format!("{}: a refusal, mean", self.name), mean, "µs");
    }
}

pub(crate) async fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    if !Home::possible() {
        report.note("timing of refusals: skipped, a daemon of its own needs root");
        return Ok(());
    }
    let key = fresh_key()?;
    let home = Home::make(Some(key.clone()))?;
    let daemon = home.serve().await?;
    let mut doors = doors(&daemon, key).await?;
    let mut line = Line::open(&daemon.address()).await?;
    let mut random = SplitMix::default();
    let guesses = if bench.quick { QUICK_GUESSES } else { GUESSES };
    for round in 0..WARM_UP + guesses {
        // Every kind once a round, in an order that nothing else can follow.
        let mut kinds: Vec<_> = (0..doors.len() * GUESSED.len()).collect();
        kinds.sort_by_cached_key(|_| random.draw());
        for kind in kinds {
            let (door, guess) = (&mut doors[kind / GUESSED.len()], kind % GUESSED.len());
            let request = door.request(GUESSED[guess], &mut random);
            let micros = line.refusal(&request).await?;
            if round >= WARM_UP {
                door.times[guess].push(micros);
            }
        }
    }
    for door in &doors {
        door.report(report);
    }
    report.note(format!("timing: {guesses} guesses of each kind; |t| is the largest of {CROPS:?}"));
    daemon.stop().await
}

async fn doors(daemon: &Daemon, key: String) -> Result<Vec<Door>> {
    let client = &daemon.client;
    let label = "timing".to_owned();
    let made: ApiKey = client.post(&Route::new("/v1/keys"), &CreateKey { label }).await?;
    let previews = Route::sandbox(&daemon.sandbox().await?.id).then("/previews");
    let preview: Preview = client.post(&previews, &CreatePreview::new(PORT)).await?;
    let tokens = previews.part(preview.name.as_str()).then("/tokens");
    let token: PreviewToken = client.post(&tokens, &CreatePreviewToken::default()).await?;
    let untold = || Error::failed("the daemon did not tell a secret that it made");
    let api = "GET /v1/info HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer ".to_owned();
    let page =
        format!("GET / HTTP/1.1\r\nhost: {}.localhost\r\n{TOKEN_HEADER}: ", preview.label.as_str());
    Ok(vec![
        Door::new("configured key", key, api.clone()),
        Door::new("key of the ledger", made.secret.ok_or_else(untold)?, api),
        Door::new("preview token", token.token.ok_or_else(untold)?, page),
    ])
}

/// A connection that is kept.
struct Line {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Line {
    async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.map_err(broken)?;
        stream.set_nodelay(true).map_err(broken)?;
        Ok(Self { stream, answer: Vec::with_capacity(64 * 1024) })
    }

    /// Microseconds until the first byte of a refusal.
    async fn refusal(&mut self, request: &[u8]) -> Result<f64> {
        self.answer.clear();
        let begun = Instant::now();
        self.stream.write_all(request).await.map_err(broken)?;
        let mut came = self.stream.read_buf(&mut self.answer).await.map_err(broken)?;
        let micros = begun.elapsed().as_secs_f64() * 1e6;
        while came > 0 && !is_whole(&self.answer) {
            came = self.stream.read_buf(&mut self.answer).await.map_err(broken)?;
        }
        if came > 0 && self.answer.starts_with(b"HTTP/1.1 401 ") {
            return Ok(micros);
        }
        let said = String::from_utf8_lossy(&self.answer).lines().next().unwrap_or("").to_owned();
        Err(Error::failed(format!("a wrong secret was not refused as usual: {said:?}")))
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::local("speak with a daemon of its own", error)
}

fn is_whole(answer: &[u8]) -> bool {
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.and_then(|length| length.parse().ok()).is_some_and(|length: usize| body.len() >= length)
}

/// The largest |t| of all crops.
fn difference(one: &[f64], other: &[f64]) -> f64 {
    let mut all = [one, other].concat();
    all.sort_by(f64::total_cmp);
    let crops = CROPS.iter().map(|share| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank")]
        let rank = (length(&all) * share) as usize;
        let most = all[rank.clamp(1, all.len()) - 1];
        let below = |times: &[f64]| -> Vec<f64> {
            times.iter().copied().filter(|time| *time <= most).collect()
        };
        welch(&below(one), &below(other)).abs()
    });
    crops.fold(0.0, f64::max)
}

/// Welch's t of two samples.
fn welch(one: &[f64], other: &[f64]) -> f64 {
    let moments = |times: &[f64]| {
        let mean = times.iter().sum::<f64>() / length(times);
        let squares: f64 = times.iter().map(|time| (time - mean).powi(2)).sum();
        (mean, squares / (length(times) - 1.0) / length(times))
    };
    let ((a, of_a), (b, of_b)) = (moments(one), moments(other));
    (a - b) / (of_a + of_b).sqrt()
}

#[expect(clippy::cast_precision_loss, reason = "thousands")]
fn length(times: &[f64]) -> f64 {
    times.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_pass_and_a_difference_far_below_the_noise_is_seen() {
        let mut random = SplitMix::default();
        let mut times = |more: f64| -> Vec<f64> {
            (0..GUESSES).map(|_| more + 100.0 * random.share()).collect()
        };
        let (one, other, slower) = (times(0.0), times(0.0), times(3.0));
        assert!(difference(&one, &other) < LIMIT);
        assert!(difference(&one, &slower) > LIMIT);
    }

    #[test]
    fn guesses_differ_from_the_secret_as_they_say_and_in_nothing_else() {
        let secret = format!("tpk_{}", "0123456789abcdef".repeat(4));
        let door = Door::new("key", secret.clone(), "head ".into());
        let right = format!("head {secret}\r\n\r\n").into_bytes();
        for (guess, wrong) in [(Guess::Far, 64), (Guess::Near, 1)] {
            let request = door.request(guess, &mut SplitMix::default());
            let differing = request.iter().zip(&right).filter(|(a, b)| a != b).count();
            assert_eq!((request.len(), differing), (right.len(), wrong), "{guess:?}");
        }
    }
}
