//! Files of a sandbox: read, write, edit, list, delete.
//!
//! Who changes a file takes turns with others that do in the same sandbox: an edit is made of what was read, and
//! clients call several tools at once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedMutexGuard;
use torpor_protocol::api::FileEntry;
use torpor_protocol::{ErrorCode, SandboxId};
use torpor_service::processes::Awake;
use torpor_service::{Error, Result, files};

use super::shown::ShownFile;
use crate::answer::Answer;
use crate::run::within;
use crate::tool::{Call, Effect, Tool};

/// Bytes of a file in one answer.
const READ: u64 = 64 * 1024;
const READ_MAX: u64 = 512 * 1024;
/// Largest content of a file in a request, before base64.
const WRITE_MAX: usize = 2 * 1024 * 1024;
/// Largest file that can be edited: it is read and written as a whole.
const EDIT_MAX: u64 = 8 * 1024 * 1024;
/// Entries in one answer.
const ENTRIES: usize = 500;
const ENTRIES_MAX: usize = 5000;
const DEPTH_MAX: u32 = 64;
/// How long a change may wait for others in the same sandbox.
const TURN_DEADLINE: Duration = Duration::from_secs(30);

/// Sandboxes in which files are being changed: as many as calls are under way.
static TURNS: LazyLock<Mutex<HashMap<SandboxId, Weak<Turn>>>> = LazyLock::new(Mutex::default);
type Turn = tokio::sync::Mutex<()>;

/// Waits until nobody else changes files of this sandbox through tools.
async fn turn(of: &SandboxId) -> Result<OwnedMutexGuard<()>> {
    let turn = {
        let mut turns = TURNS.lock();
        turns.retain(|_, turn| turn.strong_count() > 0);
        let known = turns.get(of).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let turn = Arc::<Turn>::default();
            turns.insert(of.clone(), Arc::downgrade(&turn));
            turn
        })
    };
    let taken = tokio::time::timeout(TURN_DEADLINE, turn.lock_owned()).await;
    taken.map_err(|_| Error::new(ErrorCode::Timeout, "other calls change files of this sandbox"))
}

/// A path that a kernel could take.
pub(super) fn checked(path: String) -> Result<String> {
    files::PathText::new(path).map(|path| path.0).map_err(Error::invalid)
}

/// At most so many bytes of a file.
async fn content(call: &Call, awake: Awake, path: String, from: u64, most: u64) -> Result<Vec<u8>> {
    let content = files::read(&call.service, awake, path, from, Some(most)).await?;
    let mut pieces = content.pieces;
    let mut all = Vec::new();
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| {
            Error::new(ErrorCode::FileRefused, format!("the file could not be read: {error}"))
        })?;
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

async fn replace(
    call: &Call,
    awake: &Awake,
    write: files::Write,
    content: Vec<u8>,
) -> Result<FileEntry> {
    let pieces = stream::iter([Ok(Bytes::from(content))]).boxed();
    files::write(&call.service, awake, write, pieces).await
}

// === read_file ===

/// Arguments of `read_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ReadFile {
    /// Absolute path.
    path: String,
    /// Byte to begin at. Default 0.
    #[serde(default)]
    offset: u64,
    /// Bytes to read. Default 65536, at most 524288.
    #[serde(default)]
    #[schemars(range(min = 1, max = 524288))]
    max_bytes: Option<u64>,
}

/// A file, or a part of it.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FileContent {
    path: String,
    /// utf-8, or base64 for bytes that are no text.
    encoding: String,
    content: String,
    offset: u64,
    /// Bytes in this answer.
    bytes: u64,
    /// Bytes of the whole file.
    size: u64,
    /// There is more after this.
    truncated: bool,
}

impl Tool for ReadFile {
    const NAME: &'static str = "read_file";
    const TITLE: &'static str = "Read a file";
    const ABOUT: &'static str = "Read a file, or a part of it. Text comes as it is; bytes that are not \
        UTF-8 come as base64. For lines and patterns use grep or run.";
    const EFFECT: Effect = Effect::Reads;
    type Output = FileContent;

    async fn call(self, call: &Call) -> Result<Answer> {
        let most = self.max_bytes.unwrap_or(READ);
        within("max_bytes", most, 1, READ_MAX)?;
        let path = checked(self.path)?;
        let awake = call.awake().await?;
        let size = files::stat(&awake, path.clone()).await?.size;
        let mut bytes = content(call, awake, path.clone(), self.offset, most).await?;
        let mut end = self.offset.saturating_add(bytes.len() as u64);
        let truncated = end < size;
        if truncated {
            bytes.truncate(whole_characters(&bytes));
            end = self.offset + bytes.len() as u64;
        }
        let count = bytes.len() as u64;
        let (encoding, content) = match String::from_utf8(bytes) {
            Ok(text) => ("utf-8", text),
            Err(error) => ("base64", STANDARD.encode(error.as_bytes())),
        };
        let mut text = match encoding {
            "base64" => format!("{path}: {count} bytes that are not UTF-8, as base64:\n{content}"),
            _ => content.clone(),
        };
        if truncated {
            text.push_str(&format!(
                "\n[… bytes {} to {end} of {size}; go on with offset {end} …]",
                self.offset
            ));
        }
        let encoding = encoding.to_owned();
        // Files of /proc say that they are empty and are not.
        let size = if count == 0 { size } else { size.max(end) };
        let offset = self.offset;
        let value = FileContent { path, encoding, content, offset, bytes: count, size, truncated };
        Ok(Answer::new(text, &value))
    }
}

/// So many bytes are characters, if all but a last one that is cut are; else all.
fn whole_characters(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() && error.valid_up_to() > 0 => error.valid_up_to(),
        Ok(_) | Err(_) => bytes.len(),
    }
}

// === write_file ===

/// How content is written in JSON.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    Base64,
}

/// Arguments of `write_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct WriteFile {
    /// Absolute path. Directories that are missing are made.
    path: String,
    /// The new content, at most 2 MiB.
    content: String,
    /// How `content` is written: utf-8 (default) or base64.
    #[serde(default)]
    encoding: Encoding,
    /// Add to the end instead of replacing the file.
    #[serde(default)]
    append: bool,
    /// Permission bits, octal, such as 0755. Default: as they were, 0644 for a new file.
    #[serde(default)]
    mode: Option<String>,
}

/// What was written.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Written {
    path: String,
    /// Bytes of the file now.
    size: u64,
}

impl Tool for WriteFile {
    const NAME: &'static str = "write_file";
    const TITLE: &'static str = "Write a file";
    const ABOUT: &'static str = "Write a file as a whole, or add to its end. It is replaced at once: \
        nobody ever sees half of it. To change a part of a file use edit_file.";
    const EFFECT: Effect = Effect::Destroys;
    type Output = Written;

    async fn call(self, call: &Call) -> Result<Answer> {
        let content = match self.encoding {
            Encoding::Utf8 => self.content.into_bytes(),
            Encoding::Base64 => STANDARD
                .decode(self.content)
                .map_err(|error| Error::invalid(format!("content is not base64: {error}")))?,
        };
        if content.len() > WRITE_MAX {
            let message = format!("content has at most {WRITE_MAX} bytes");
            let hint = "append in several calls, or fetch it inside with run";
            return Err(Error::with_hint(ErrorCode::TooLarge, message, hint));
        }
        let mode = self.mode.map(|text| {
            let bits = u32::from_str_radix(&text, 8).ok().filter(|bits| *bits <= 0o7777);
            bits.ok_or_else(|| Error::invalid("mode is not octal, like 0644"))
        });
        let mode = mode.transpose()?;
        let write =
            files::Write { path: checked(self.path)?, append: self.append, mode, owner: None };
        let awake = call.awake().await?;
        let _turn = turn(call.sandbox()?.id()).await?;
        let entry = replace(call, &awake, write, content).await?;
        let written = Written { path: entry.path, size: entry.size };
        Ok(Answer::new(format!("{} has {} bytes", written.path, written.size), &written))
    }
}

// === edit_file ===

/// Arguments of `edit_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct EditFile {
    /// Absolute path of a UTF-8 file of at most 8 MiB.
    path: String,
    /// The exact text to replace. It must occur once, unless `replace_all` is set.
    old: String,
    /// The text to put in its place.
    new: String,
    /// Replace every occurrence.
    #[serde(default)]
    replace_all: bool,
}

/// What an edit did.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Edited {
    path: String,
    /// How many occurrences were replaced.
    replaced: usize,
    /// Line of the first one, from 1.
    line: usize,
    /// Bytes of the file now.
    size: u64,
}

impl Tool for EditFile {
    const NAME: &'static str = "edit_file";
    const TITLE: &'static str = "Edit a file";
    const ABOUT: &'static str = "Replace an exact piece of text in a file by another. Give enough of the \
        surrounding text that it occurs once. Nothing is changed if it does not occur, or several times.";
    const EFFECT: Effect = Effect::Destroys;
    type Output = Edited;

    async fn call(self, call: &Call) -> Result<Answer> {
        if self.old.is_empty() || self.old == self.new {
            return Err(Error::invalid("old is empty, or the same as new"));
        }
        let path = checked(self.path)?;
        let awake = call.awake().await?;
        let _turn = turn(call.sandbox()?.id()).await?;
        let bytes = content(call, awake, path.clone(), 0, EDIT_MAX + 1).await?;
        if bytes.len() as u64 > EDIT_MAX {
            let message = format!("{path} has more than {EDIT_MAX} bytes");
            return Err(Error::with_hint(ErrorCode::TooLarge, message, "edit it with sed in run"));
        }
        let before = String::from_utf8(bytes)
            .map_err(|_| Error::new(ErrorCode::FileRefused, format!("{path} is not UTF-8")))?;
        let found = before.matches(&self.old).count();
        let Some(at) = before.find(&self.old) else {
            return Err(Error::invalid(format!("old does not occur in {path}")));
        };
        if found > 1 && !self.replace_all {
            let message = format!("old occurs {found} times in {path}");
            let hint = "give more of the text around it, or set replace_all";
            return Err(Error::with_hint(ErrorCode::InvalidRequest, message, hint));
        }
        // Before it is there: what one byte becomes, a whole file of them becomes as well.
        if length_after(before.len(), found, &self.old, &self.new).is_none() {
            let message = format!("{path} would have more than {EDIT_MAX} bytes");
            return Err(Error::with_hint(ErrorCode::TooLarge, message, "edit it with sed in run"));
        }
        let line = before[..at].matches('\n').count() + 1;
        let after = before.replace(&self.old, &self.new);
        let write = files::Write { path, ..files::Write::default() };
        let awake = call.awake().await?;
        let entry = replace(call, &awake, write, after.into_bytes()).await?;
        let edited = Edited { path: entry.path, replaced: found, line, size: entry.size };
        let times = if found == 1 { String::new() } else { format!(" {found} times") };
        Ok(Answer::new(format!("{} changed{times}, first at line {line}", edited.path), &edited))
    }
}

/// Bytes of a file in which a text was replaced so often; none if it is too large to be edited again.
fn length_after(before: usize, found: usize, old: &str, new: &str) -> Option<u64> {
    let kept = before.checked_sub(found.checked_mul(old.len())?)?;
    let after = u64::try_from(kept.checked_add(found.checked_mul(new.len())?)?).ok()?;
    (after <= EDIT_MAX).then_some(after)
}

// === list_files ===

/// Arguments of `list_files`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ListFiles {
    /// Absolute path of a directory.
    path: String,
    /// How many levels deep. Default 1: only its own entries.
    #[serde(default)]
    #[schemars(range(min = 1, max = 64))]
    depth: Option<u32>,
    /// Entries in the answer. Default 500, at most 5000.
    #[serde(default)]
    #[schemars(range(min = 1, max = 5000))]
    limit: Option<usize>,
}

/// Entries of directories, sorted by path.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Listing {
    entries: Vec<ShownFile>,
    /// All there are, also those left out.
    total: usize,
    /// Some are left out.
    truncated: bool,
}

impl Listing {
    /// Entries below a directory, whose paths become whole.
    pub(super) fn of(all: Vec<FileEntry>, below: &str, limit: usize) -> Self {
        let total = all.len();
        let below = below.trim_end_matches('/');
        let whole = |entry: FileEntry| {
            let path = format!("{below}/{}", entry.path);
            ShownFile::from(FileEntry { path, ..entry })
        };
        let entries = all.into_iter().take(limit).map(whole).collect();
        Self { entries, total, truncated: total > limit }
    }

    pub(super) fn answer(&self) -> Answer {
        let mut lines: Vec<String> = self.entries.iter().map(ShownFile::line).collect();
        if self.truncated {
            lines.push(format!("[… {} of {} shown …]", self.entries.len(), self.total));
        }
        if lines.is_empty() {
            lines.push("nothing".to_owned());
        }
        Answer::new(lines.join("\n"), self)
    }
}

pub(super) fn limited(limit: Option<usize>) -> Result<usize> {
    let limit = limit.unwrap_or(ENTRIES);
    within("limit", limit, 1, ENTRIES_MAX)?;
    Ok(limit)
}

impl Tool for ListFiles {
    const NAME: &'static str = "list_files";
    const TITLE: &'static str = "List files";
    const ABOUT: &'static str =
        "List a directory: paths, kinds and sizes, sorted; also several levels deep.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Listing;

    async fn call(self, call: &Call) -> Result<Answer> {
        let (limit, depth) = (limited(self.limit)?, self.depth.unwrap_or(1));
        within("depth", depth, 1, DEPTH_MAX)?;
        let path = checked(self.path)?;
        let awake = call.awake().await?;
        let all = files::list(&awake, path.clone(), depth).await?;
        Ok(Listing::of(all, &path, limit).answer())
    }
}

// === delete_file ===

/// Arguments of `delete_file`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct DeleteFile {
    /// Absolute path of a file or directory.
    path: String,
    /// A directory with everything in it.
    #[serde(default)]
    recursive: bool,
}

/// What is gone.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Deleted {
    path: String,
}

impl Tool for DeleteFile {
    const NAME: &'static str = "delete_file";
    const TITLE: &'static str = "Delete a file or directory";
    const ABOUT: &'static str = "Delete a file or an empty directory; with `recursive` a directory and \
        everything in it. There is no way back but a snapshot that was taken before.";
    const EFFECT: Effect = Effect::DestroysOnce;
    type Output = Deleted;

    async fn call(self, call: &Call) -> Result<Answer> {
        let path = checked(self.path)?;
        let awake = call.awake().await?;
        files::remove(&awake, path.clone(), self.recursive).await?;
        Ok(Answer::new(format!("{path} is gone"), &Deleted { path }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_what_an_edit_makes_is_known_before_and_bounded() {
        assert_eq!(length_after(10, 2, "ab", "abc"), Some(12));
        assert_eq!(length_after(10, 5, "ab", ""), Some(0));
        let largest = EDIT_MAX as usize;
        assert_eq!(length_after(largest, 1, "a", "b"), Some(EDIT_MAX));
        assert_eq!(length_after(largest, 1, "a", "bb"), None);
        assert_eq!(length_after(largest, usize::MAX, "a", "bb"), None);
    }

    #[test]
    fn a_part_of_a_text_ends_with_a_whole_character() {
        assert_eq!(whole_characters("aä".as_bytes()), 3);
        assert_eq!(whole_characters(&"aä".as_bytes()[..2]), 1);
        assert_eq!(whole_characters(&[0xff, 0xfe, 0xc3]), 3, "that is no text anyway");
    }
}
