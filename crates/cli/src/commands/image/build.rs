//! `torpor image build`

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use http::Method;
use torpor_client::{Client, Route};
use torpor_protocol::api::Image;
use torpor_protocol::pattern::Ignore;

use super::build_progress::{self, Style};
use super::events;
use crate::archive::{Choice, Owners};
use crate::commands::cp::{note_left_out, packed_after};
use crate::commands::parse_env;
use crate::error::{Error, Result};
use crate::progress::Progress;

/// Says what of a context is not part of it.
const IGNORE_FILE: &str = ".dockerignore";

/// Build an image from a Dockerfile.
///
/// Steps that were done before with the same input are not done again.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor image build -t python .\n  \
    torpor image build -t app -f deploy/Dockerfile --build-arg VERSION=3 .\n  \
    torpor image build -t app --target test --secret id=npmrc,src=$HOME/.npmrc .")]
pub(super) struct Build {
    /// What to call it.
    #[arg(short = 't', long, visible_alias = "tag")]
    name: String,
    /// The Dockerfile, below the directory.
    #[arg(short, long, default_value = "Dockerfile")]
    file: String,
    /// Value for an ARG; KEY alone passes on our own environment variable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_env)]
    build_arg: Vec<(String, String)>,
    /// The stage to build, by name or number; the last one if not given.
    #[arg(long, value_name = "STAGE")]
    target: Option<String>,
    /// A value for RUN --mount=type=secret: `id=ID,src=FILE`, `id=ID,env=VARIABLE`, or `id=ID` alone
    /// for the variable ID, or else the file ID.
    #[arg(long, value_name = "SECRET", value_parser = SecretSource::parse)]
    secret: Vec<SecretSource>,
    /// Do every step again.
    #[arg(long)]
    no_cache: bool,
    /// Look for the images of FROM in their registries, also if they are here.
    #[arg(long)]
    pull: bool,
    /// How to show what happens.
    #[arg(long, value_enum, default_value = "auto")]
    progress: Style,
    /// The directory that COPY takes from.
    #[arg(default_value = ".")]
    directory: PathBuf,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

/// Where a secret comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SecretSource {
    id: String,
    from: From,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum From {
    File(PathBuf),
    Variable(String),
    /// A variable of the same name, or else a file.
    Either,
}

impl SecretSource {
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let (mut id, mut from) = (None, From::Either);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("id", value)) => id = Some(value.to_owned()),
                Some(("src" | "source", value)) => from = From::File(value.into()),
                Some(("env", value)) => from = From::Variable(value.to_owned()),
                Some(("type", "file" | "env")) => {}
                Some(_) | None => return Err(format!("{part:?} is not id=, src= or env=")),
            }
        }
        let id = id.filter(|id| !id.is_empty()).ok_or("a secret needs an id=")?;
        Ok(Self { id, from })
    }

    /// Its value, as it is sent.
    fn read(&self) -> Result<String> {
        let variable = |name: &str| std::env::var(name).ok().map(String::into_bytes);
        let file = |path: &PathBuf| {
            let shown = path.display();
            std::fs::read(path).map_err(|error| Error::local(format!("can't read {shown}"), error))
        };
        let value = match &self.from {
            From::File(path) => file(path)?,
            From::Variable(name) => variable(name)
                .ok_or_else(|| Error::failed(format!("the variable {name} is not set")))?,
            From::Either => match variable(&self.id) {
                Some(value) => value,
                None => file(&PathBuf::from(&self.id))?,
            },
        };
        Ok(STANDARD.encode(value))
    }
}

/// What is sent of a context: the daemon heeds its `.dockerignore` itself, and needs that and the Dockerfile.
fn choice(directory: &Path, dockerfile: &str) -> Choice {
    let path = directory.join(IGNORE_FILE);
    let plain = std::fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
    // What can't be read is the daemon's to refuse.
    let text = plain.then(|| std::fs::read_to_string(&path).ok()).flatten();
    let ignore = text.map(|text| Ignore::parse(&text)).unwrap_or_default();
    let dockerfile = Path::new(dockerfile).components();
    let dockerfile = dockerfile.filter(|part| matches!(part, Component::Normal(_))).collect();
    Choice { ignore, always: vec![PathBuf::from(IGNORE_FILE), dockerfile] }
}

/// A directory to be sent, and how it is to be built.
pub(in crate::commands) struct Context {
    pub(in crate::commands) directory: PathBuf,
    pub(in crate::commands) dockerfile: String,
    /// What precedes the directory in the body.
    pub(in crate::commands) head: Vec<u8>,
    pub(in crate::commands) route: Route,
    pub(in crate::commands) style: Style,
}

impl Context {
    /// Sends it, and shows what becomes of it.
    pub(in crate::commands) async fn build(self, client: &Client) -> Result<Image> {
        let Self { directory, dockerfile, head, route, style } = self;
        let progress = Progress::bytes(None, format!("sending {}", directory.display()));
        let count = progress.counter();
        let send = async |body| {
            let events = client.lines(Method::POST, &route, body).await?;
            drop(progress);
            build_progress::follow(events, style).await
        };
        let choice = choice(&directory, &dockerfile);
        let (packed, image) =
            packed_after(head, directory, (Owners::Root, choice), count, send).await?;
        note_left_out(&packed);
        Ok(image)
    }
}

impl Build {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if !self.directory.join(&self.file).is_file() {
            let shown = self.directory.join(&self.file);
            return Err(Error::Failed {
                message: format!("there is no {}", shown.display()),
                hint: Some("name it with -f, relative to the directory".to_owned()),
            });
        }
        let secrets = self.secrets()?;
        let context = Context {
            route: self.route(secrets.len()),
            head: secrets,
            dockerfile: self.file,
            directory: self.directory,
            style: self.progress,
        };
        let image = context.build(client).await?;
        events::report(&image, self.json)?;
        Ok(ExitCode::SUCCESS)
    }

    fn route(&self, secrets_bytes: usize) -> Route {
        let mut route = Route::new("/v1/images/build")
            .query("name", &self.name)
            .query("dockerfile", &self.file);
        for (key, value) in &self.build_arg {
            route = route.query("arg", &format!("{key}={value}"));
        }
        if let Some(target) = &self.target {
            route = route.query("target", target);
        }
        for (key, wanted) in [("no_cache", self.no_cache), ("pull", self.pull)] {
            if wanted {
                route = route.query(key, "true");
            }
        }
        if secrets_bytes > 0 {
            route = route.query("secrets_bytes", &secrets_bytes.to_string());
        }
        route
    }

    /// What precedes the context in the body.
    fn secrets(&self) -> Result<Vec<u8>> {
        if self.secret.is_empty() {
            return Ok(Vec::new());
        }
        let mut values = BTreeMap::new();
        for secret in &self.secret {
            values.insert(&secret.id, secret.read()?);
        }
        serde_json::to_vec(&values).map_err(|error| Error::internal("secrets can't be sent", error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_says_where_it_comes_from() {
        let source = |text: &str| SecretSource::parse(text).map(|source| (source.id, source.from));
        let id = || "x".to_owned();
        assert_eq!(source("id=x"), Ok((id(), From::Either)));
        assert_eq!(source("id=x,src=/a"), Ok((id(), From::File("/a".into()))));
        assert_eq!(source("type=env,id=x,env=Y"), Ok((id(), From::Variable("Y".to_owned()))));
        for wrong in ["", "x", "src=/a", "id=", "id=x,mode=1"] {
            assert!(source(wrong).is_err(), "{wrong}");
        }
    }
}
