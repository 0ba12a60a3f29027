//! Files with many certificates, which belong to the image: ours is put between two lines that say
//! so, and everything else stays as it is.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::certificate::Certificate;
use crate::identity::replace;

const BEGIN: &[u8] = b"# torpor: begin, whoever reads some requests of this sandbox\n";
const END: &[u8] = b"# torpor: end\n";
/// A larger file is left alone: those of distributions have a quarter of a MiB.
const SIZE_MAX: u64 = 8 * 1024 * 1024;

/// The content of a plain file, and what it was. Never waits, whatever is there.
pub(super) fn read(place: &Path) -> io::Result<(Vec<u8>, Metadata)> {
    // A fifo would keep the agent until somebody writes into it.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(place)?;
    let about = file.metadata()?;
    if !about.is_file() || about.len() > SIZE_MAX {
        return Err(io::Error::other("it is no file of certificates"));
    }
    Ok((all_of(&file, about.len())?, about))
}

fn all_of(file: &File, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(SIZE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Puts the certificates into the file at `place`, instead of those `before`.
pub(super) fn add(
    place: &Path,
    certificates: &[Certificate],
    before: &[Certificate],
) -> io::Result<()> {
    let (now, about) = read(place)?;
    let wanted = with(&now, certificates, before);
    if wanted == now { Ok(()) } else { replace(place, &wanted, Some(&about)) }
}

/// Takes them out of the file at `place`, which is removed if nothing else was in it.
pub(super) fn take_out(place: &Path, certificates: &[Certificate]) -> io::Result<()> {
    let (now, about) = match read(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read?,
    };
    let wanted = without(&now, certificates);
    match wanted.is_empty() {
        true => fs::remove_file(place),
        false if wanted == now => Ok(()),
        false => replace(place, &wanted, Some(&about)),
    }
}

/// The certificates of a bundle, with these, and without those `before`.
pub(super) fn with(bundle: &[u8], certificates: &[Certificate], before: &[Certificate]) -> Vec<u8> {
    let mut text = without(bundle, &[before, certificates].concat());
    if text.last().is_some_and(|last| *last != b'\n') {
        text.push(b'\n');
    }
    text.extend(BEGIN);
    for certificate in certificates {
        text.extend(certificate.pem().as_bytes());
    }
    text.extend(END);
    text
}

/// The certificates of a bundle but for ours: between our lines, or where the image's own tools put
/// it.
fn without(bundle: &[u8], ours: &[Certificate]) -> Vec<u8> {
    let mut kept = Vec::with_capacity(bundle.len());
    let mut rest = bundle;
    while !rest.is_empty() {
        let known = ours.iter().map(|certificate| certificate.pem().as_bytes());
        if let Some(behind) = known.filter_map(|pem| rest.strip_prefix(pem)).next() {
            rest = behind;
            continue;
        }
        let (line, behind) = rest.split_at(line_length(rest));
        // A beginning without an end is a line of ours, and what follows is theirs.
        rest = if line == BEGIN { behind_end(behind).unwrap_or(behind) } else { behind };
        if line != BEGIN {
            kept.extend(line);
        }
    }
    kept
}

fn line_length(text: &[u8]) -> usize {
    text.iter().position(|byte| *byte == b'\n').map_or(text.len(), |end| end + 1)
}

fn behind_end(text: &[u8]) -> Option<&[u8]> {
    let mut rest = text;
    while !rest.is_empty() {
        let (line, behind) = rest.split_at(line_length(rest));
        if line == END {
            return Some(behind);
        }
        rest = behind;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::samples::{ONE, OTHER};
    use super::*;

    fn certificate(text: &str) -> Certificate {
        Certificate::parse(text).unwrap()
    }

    #[test]
    fn ours_is_there_once_and_everything_else_as_it_was() {
        let theirs = [b"# caf\xe9\n", OTHER.as_bytes()].concat();
        let one = [certificate(ONE)];
        let added = with(&theirs, &one, &[]);
        assert!(added.starts_with(&theirs));
        assert_eq!(with(&added, &one, &[]), added);
        assert_eq!(with(&added, &one, &one), added);
        assert_eq!(without(&added, &[]), theirs);
    }

    #[test]
    fn what_the_images_tools_made_of_it_is_ours_too() {
        let (one, other) = ([certificate(ONE)], [certificate(OTHER)]);
        let theirs = [OTHER, ONE, "# end\n"].concat();
        let added = String::from_utf8(with(theirs.as_bytes(), &one, &[])).unwrap();
        assert_eq!((added.matches(ONE).count(), added.matches(OTHER).count()), (1, 1));
        let changed = with(added.as_bytes(), &other, &one);
        let changed = String::from_utf8(changed).unwrap();
        assert_eq!((changed.matches(ONE).count(), changed.matches(OTHER).count()), (0, 1));
        assert_eq!(without(changed.as_bytes(), &other), b"# end\n");
    }

    #[test]
    fn a_block_that_was_cut_takes_nothing_else_with_it() {
        let cut = [BEGIN, OTHER.as_bytes()].concat();
        assert_eq!(without(&cut, &[]), OTHER.as_bytes());
        assert_eq!(without(b"no line end", &[]), b"no line end");
        assert!(with(b"x", &[certificate(ONE)], &[]).starts_with(b"x\n# torpor: begin"));
    }
}
