//! The outer wrapping of a Debian package: an `ar` archive of three members.
//!
//! ```text
//!   "!<arch>\n"  { name 16 | time 12 | owner 6 | group 6 | mode 8 | size 10 | "`\n" | data, even }*
//! ```

const MAGIC: &[u8] = b"!<arch>\n";
const HEADER: usize = 60;
/// A package has three members; some have a signature besides.
const MEMBERS_MAX: usize = 16;

/// One file in the archive.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Member<'a> {
    pub name: &'a str,
    pub data: &'a [u8],
}

/// All members, or what is wrong with the archive.
pub(crate) fn members(archive: &[u8]) -> Result<Vec<Member<'_>>, String> {
    let mut rest = archive.strip_prefix(MAGIC).ok_or("it is no ar archive")?;
    let mut members = Vec::new();
    while !rest.is_empty() {
        if members.len() == MEMBERS_MAX {
            return Err("it has too many members".to_owned());
        }
        let (header, data) = rest.split_at_checked(HEADER).ok_or("it ends within a header")?;
        if &header[58..] != b"`\n" {
            return Err("a header of a member is broken".to_owned());
        }
        let name = text(&header[..16])?.trim_end_matches('/');
        let size: usize = text(&header[48..58])?.parse().map_err(|_| "a size is no number")?;
        let (data, after) = data.split_at_checked(size).ok_or("it ends within a member")?;
        members.push(Member { name, data });
        // Data of odd length is followed by one byte of nothing, but for the last.
        rest = after.get(size % 2..).unwrap_or_default();
    }
    Ok(members)
}

fn text(field: &[u8]) -> Result<&str, String> {
    let text = std::str::from_utf8(field).map_err(|_| "a header of a member is no text")?;
    Ok(text.trim_end_matches(' '))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forge;

    #[test]
    fn members_come_out_as_they_went_in() {
        let archive = forge::ar(&[("debian-binary", b"2.0\n"), ("odd/", b"123"), ("last", b"x")]);
        let names: Vec<_> = members(&archive).unwrap().iter().map(|m| (m.name, m.data)).collect();
        let expected: [(&str, &[u8]); 3] =
            [("debian-binary", b"2.0\n"), ("odd", b"123"), ("last", b"x")];
        assert_eq!(names, expected);
    }

    #[test]
    fn an_archive_that_ends_early_is_refused_wherever_it_ends() {
        let archive = forge::ar(&[("first", b"1234"), ("second", b"123456")]);
        // Where a member ends, an archive may end.
        let whole = [MAGIC.len(), MAGIC.len() + HEADER + 4, archive.len()];
        for length in 0..archive.len() {
            let read = members(&archive[..length]);
            assert_eq!(read.is_ok(), whole.contains(&length), "{length}: {read:?}");
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for size in ["9999999999", "-1", "", "0x10", "+4"] {
            let mut archive = forge::ar(&[("name", b"1234")]);
            archive[8 + 48..8 + 58].copy_from_slice(format!("{size:<10}").as_bytes());
            assert_eq!(members(&archive).is_ok(), size == "+4", "{size}");
        }
    }

    #[test]
    fn members_without_end_are_refused() {
        let many = vec![("x", b"".as_slice()); MEMBERS_MAX + 1];
        assert!(members(&forge::ar(&many)).unwrap_err().contains("too many"));
    }
}
