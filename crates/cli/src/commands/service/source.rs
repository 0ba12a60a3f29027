//! What a directory is made of, and how it becomes an image: its Dockerfile, or else one that follows from what is
//! in it.

use std::path::Path;

use torpor_client::{Client, Route};
use torpor_protocol::Name;
use torpor_protocol::api::Image;

use crate::commands::image::build::Context;
use crate::commands::image::build_progress::Style;
use crate::error::{Error, Result};
use crate::output;

const DOCKERFILE: &str = "Dockerfile";
/// The file that is sent along when there is none. No file of a user's is called so.
const GENERATED: &str = ".torpor.Dockerfile";
/// Where programs listen that follow the rules below; they are also told by PORT.
const PORT: u16 = 8080;
/// Blocks of a tar.
const BLOCK: usize = 512;

/// Builds the image of a directory.
pub(super) async fn build(client: &Client, directory: &Path, name: &Name) -> Result<Image> {
    let (dockerfile, head) = if directory.join(DOCKERFILE).is_file() {
        (DOCKERFILE.to_owned(), Vec::new())
    } else {
        let (what, text) = generated(directory)?;
        output::note(&format!("no Dockerfile: taken for {what}"));
        (GENERATED.to_owned(), entry(GENERATED, &text)?)
    };
    let route = Route::new("/v1/images/build")
        .query("name", &format!("service-{name}"))
        .query("dockerfile", &dockerfile);
    let directory = directory.to_owned();
    Context { directory, dockerfile, head, route, style: Style::Auto }.build(client).await
}

/// A file of a tar, without what ends one.
fn entry(name: &str, text: &str) -> Result<Vec<u8>> {
    let fail = |error| Error::local("can't pack a Dockerfile", error);
    let mut header = tar::Header::new_gnu();
    header.set_path(name).map_err(fail)?;
    header.set_size(text.len() as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    Ok(bytes)
}

/// What it is, and the Dockerfile for that.
fn generated(directory: &Path) -> Result<(&'static str, String)> {
    let has = |name: &str| directory.join(name).is_file();
    if has("package.json") {
        return Ok(("a Node program (package.json)", node()));
    }
    let program = ["main.py", "app.py", "server.py"].into_iter().find(|name| has(name));
    if let Some(program) = program {
        let packages = ["requirements.txt", "pyproject.toml"].into_iter().find(|name| has(name));
        return Ok(("a Python program", python(program, packages)));
    }
    if has("index.html") {
        return Ok(("static files (index.html)", files()));
    }
    Err(Error::Failed {
        message: format!("{} says in no way how it is run", directory.display()),
        hint: Some(
            "add a Dockerfile; or package.json with a start script, main.py (or app.py, server.py), or \
             index.html"
                .to_owned(),
        ),
    })
}

fn node() -> String {
    format!(
        "FROM node:22-slim\nWORKDIR /app\nCOPY . .\nRUN npm install --omit=dev\nENV NODE_ENV=production\n\
         EXPOSE {PORT}\nCMD [\"npm\", \"start\"]\n"
    )
}

fn python(program: &str, packages: Option<&str>) -> String {
    let install = match packages {
        Some("requirements.txt") => {
            "RUN pip install --break-system-packages --no-cache-dir -r requirements.txt\n"
        }
        Some(_) => "RUN pip install --break-system-packages --no-cache-dir .\n",
        None => "",
    };
    format!(
        "FROM torpor/base\nWORKDIR /app\nCOPY . .\n{install}ENV PYTHONUNBUFFERED=1\nEXPOSE {PORT}\n\
         CMD [\"python3\", \"{program}\"]\n"
    )
}

fn files() -> String {
    format!(
        "FROM torpor/base\nWORKDIR /app\nCOPY . .\nEXPOSE {PORT}\n\
         CMD [\"python3\", \"-m\", \"http.server\", \"{PORT}\"]\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_dockerfile_is_known_by_what_is_in_it() {
        let made = |files: &[&str]| {
            let dir = tempfile::tempdir().unwrap();
            files.iter().for_each(|file| std::fs::write(dir.path().join(file), "x").unwrap());
            generated(dir.path())
        };
        let (what, text) = made(&["package.json", "index.html"]).unwrap();
        assert!(what.contains("Node") && text.contains("npm install"), "{text}");
        let (_, text) = made(&["app.py", "requirements.txt"]).unwrap();
        assert!(text.contains("-r requirements.txt") && text.contains("\"app.py\""), "{text}");
        let (_, text) = made(&["main.py"]).unwrap();
        assert!(!text.contains("pip") && text.contains("EXPOSE 8080"), "{text}");
        assert!(made(&["index.html"]).unwrap().1.contains("http.server"));
        let Err(Error::Failed { hint, .. }) = made(&["readme.md"]) else { panic!() };
        assert!(hint.unwrap().contains("Dockerfile"));
    }

    #[test]
    fn the_file_that_is_sent_along_is_a_tar_that_goes_on() {
        let mut bytes = entry(GENERATED, "FROM x\n").unwrap();
        bytes.extend(entry("second", "y").unwrap());
        bytes.extend([0; 2 * BLOCK]);
        let mut archive = tar::Archive::new(&*bytes);
        let names =
            archive.entries().unwrap().map(|it| it.unwrap().path().unwrap().display().to_string());
        assert_eq!(names.collect::<Vec<_>>(), [GENERATED, "second"]);
    }
}
