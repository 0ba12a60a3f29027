//! Entry point of a fuzz target: what holds whatever a build context is.

use crate::input;
use std::fs;
use std::io;

use super::context::{Context, Node};

/// A context is refused, or all its paths stay within it, have directories above them, and files have
/// no more bytes than the archive.
pub fn build_context(bytes: &[u8]) {
    let scratch = input::Scratch::new();
    let archive = scratch.inside().join("upload");
    let bytes = input::tar(bytes);
    fs::write(&archive, &bytes).expect("a file can be written");
    let Ok(mut context) = Context::open(&archive, &scratch.inside()) else { return };
    let _ = context.heed_ignore();
    let plain = fs::metadata(scratch.inside().join("context.tar")).map(|about| about.len());
    let most = plain.unwrap_or(bytes.len() as u64);
    for path in context.paths() {
        assert!(!path.split('/').any(|part| part == ".."), "{path} leads out");
        if let Some((above, _)) = path.rsplit_once('/') {
            assert!(context.node(above).is_some(), "{path} is in nothing");
        }
        let _ = (context.text(path), context.is_archive(path));
        if let Some(Node::File { at, size, .. }) = context.node(path) {
            let copied = io::copy(&mut context.content(*at, *size), &mut io::sink());
            assert!(copied.is_err() || *size <= most, "{path} has {size} bytes");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_build_context() {
        input::replay("build_context", build_context);
    }
}
