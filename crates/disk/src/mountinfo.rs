//! What is mounted where, read from `/proc/self/mountinfo`.
//!
//! Lines that do not look like the kernel's are skipped: a new field must not stop a daemon.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// One line of mountinfo, without what nobody here asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub point: PathBuf,
    pub filesystem: String,
    pub source: PathBuf,
    /// Options of the filesystem itself; for cgroup v1 these name the controllers.
    pub options: Vec<String>,
}

/// All mounts of this mount namespace, in the order they were made.
pub fn read() -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 / /mnt/point rw,noatime shared:1 - ext3 /dev/root rw,errors=continue`, where the
/// number of fields before the lone dash varies.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let dash = fields.iter().position(|field| *field == b"-")?;
    let [filesystem, source, options] = fields.get(dash + 1..dash + 4)? else { return None };
    Some(Mount {
        point: unescape(fields.get(4)?),
        filesystem: String::from_utf8_lossy(filesystem).into_owned(),
        source: unescape(source),
        options: String::from_utf8_lossy(options).split(',').map(str::to_owned).collect(),
    })
}

/// The kernel writes blanks, tabs, newlines and backslashes of a path as `\ooo`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = (first == b'\\').then(|| tail.get(..3)).flatten();
        let code = escaped
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_fields_and_escaped_blanks_are_understood() {
        let mounts = parse(
            b"36 35 7:0 / /mnt/my\\040disk rw,noatime shared:1 master:2 - ext4 /dev/loop0 rw,discard\n\
              garbage\n\
              37 35 0:5 / /proc rw - proc proc rw\n",
        );
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].point, PathBuf::from("/mnt/my disk"));
        assert_eq!(mounts[0].filesystem, "ext4");
        assert_eq!(mounts[0].source, PathBuf::from("/dev/loop0"));
        assert_eq!(mounts[0].options, ["rw", "discard"]);
        assert_eq!(mounts[1].point, PathBuf::from("/proc"));
    }
}
