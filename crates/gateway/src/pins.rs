//! What a server shows, as items with digests; what of it differs from what was approved; and what a decision
//! makes of it.
//!
//! Invariants
//! - An item is our own serialisation of what was understood: what is pinned is what is forwarded, and a field
//!   that we do not know is neither.
//! - Clients can use what is approved and shown now with the same digest. What changed, what is new and what
//!   is gone is not there for them; the rest goes on. Of a server that says it is another one, or of which nobody
//!   approved who it says it is, nothing does.
//! - Approving names the digest of all that was shown when it was looked at.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use torpor_protocol::ErrorCode;
use torpor_protocol::mcp_gateway::{
    DecideMcpItems, McpChange, McpDiff, McpDifference, McpFlag, McpItem, McpItemKind,
};
use torpor_service::{Error, Result};
use torpor_store::McpServerRow;

use crate::{canonical, suspicion};

/// Tools and prompts of one server. The largest real ones have some hundred.
pub(crate) const ITEMS_MAX: usize = 1000;
/// Bytes of one item: the largest schemas of real tools have some tens of kilobytes.
const ITEM_MAX: usize = 256 * 1024;

/// Everything that a server shows, after the last page.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub(crate) identity: Value,
    pub(crate) instructions: Option<String>,
    pub(crate) tools: Vec<Value>,
    pub(crate) prompts: Vec<Value>,
    /// How long the server says it stays like this.
    pub(crate) ttl_ms: Option<u64>,
}

impl Listing {
    /// As items, sorted by kind and name. The text: what is wrong with it.
    pub(crate) fn into_items(self) -> std::result::Result<Vec<McpItem>, String> {
        let mut items = vec![item(McpItemKind::Identity, "identity".to_owned(), self.identity)?];
        if let Some(text) = self.instructions.filter(|text| !text.is_empty()) {
            let name = "instructions".to_owned();
            items.push(item(McpItemKind::Instructions, name, json!({ "instructions": text }))?);
        }
        for tool in self.tools {
            let tool: rmcp::model::Tool = serde_json::from_value(tool)
                .map_err(|error| format!("it lists a tool that is none: {error}"))?;
            let name = tool.name.to_string();
            let value = serde_json::to_value(&tool).map_err(|error| error.to_string())?;
            items.push(item(McpItemKind::Tool, name, value)?);
        }
        for prompt in self.prompts {
            let prompt: rmcp::model::Prompt = serde_json::from_value(prompt)
                .map_err(|error| format!("it lists a prompt that is none: {error}"))?;
            let name = prompt.name.clone();
            let value = serde_json::to_value(&prompt).map_err(|error| error.to_string())?;
            items.push(item(McpItemKind::Prompt, name, value)?);
        }
        items.sort_by(|one, other| (one.kind, &one.name).cmp(&(other.kind, &other.name)));
        let twice = items
            .windows(2)
            .find(|pair| (pair[0].kind, &pair[0].name) == (pair[1].kind, &pair[1].name));
        match twice {
            Some(pair) => Err(format!("it lists {} twice", suspicion::shown(&pair[0].name))),
            None => Ok(items),
        }
    }
}

fn item(kind: McpItemKind, name: String, value: Value) -> std::result::Result<McpItem, String> {
    let text = canonical::text(&value);
    if text.len() > ITEM_MAX {
        let name: String = suspicion::shown(&name).chars().take(80).collect();
        return Err(format!("{name} has more than {ITEM_MAX} bytes"));
    }
    let digest = blake3::hash(text.as_bytes()).to_hex().to_string();
    Ok(McpItem { kind, name, digest, value })
}

/// Of everything that a server shows.
pub(crate) fn digest_of(seen: &[McpItem]) -> String {
    let all: Vec<_> = seen.iter().map(|item| json!([item.kind, item.name, item.digest])).collect();
    canonical::digest(&Value::from(all))
}

/// Whether the server says that it is another one than was approved: its name is another, what it says was
/// rejected, or who it is was never approved. Another version of it is a difference, and its tools are looked
/// at one by one.
pub(crate) fn is_another(row: &McpServerRow) -> bool {
    let Some(now) = identity(&row.seen) else { return false };
    let differs = match identity(&row.approved) {
        Some(before) => before.value["name"] != now.value["name"],
        None => !row.approved.is_empty(),
    };
    differs || row.rejected.contains(&now.digest)
}

fn identity(items: &[McpItem]) -> Option<&McpItem> {
    items.iter().find(|item| item.kind == McpItemKind::Identity)
}

/// What clients can use.
pub(crate) fn usable(row: &McpServerRow) -> impl Iterator<Item = &McpItem> {
    let another = is_another(row);
    let seen: BTreeMap<_, _> =
        row.seen.iter().map(|item| ((item.kind, &item.name), &item.digest)).collect();
    row.approved
        .iter()
        .filter(move |item| !another && seen.get(&(item.kind, &item.name)) == Some(&&item.digest))
}

/// Names that belong to other servers, by what they look like.
#[derive(Debug, Default)]
pub(crate) struct Taken(BTreeMap<String, String>);

impl Taken {
    /// Names of servers other than this one, and of their tools that are approved.
    pub(crate) fn by_others<'a>(rows: impl Iterator<Item = &'a McpServerRow>, than: &str) -> Self {
        let mut taken = BTreeMap::new();
        for row in rows.filter(|row| row.name.as_str() != than) {
            let server = row.name.as_str();
            taken.insert(suspicion::skeleton(server), format!("the server {server}"));
            for item in row.approved.iter().filter(|item| item.kind == McpItemKind::Tool) {
                taken.insert(suspicion::skeleton(&item.name), format!("{} of {server}", item.name));
            }
        }
        Self(taken)
    }

    fn like(&self, name: &str) -> Option<&str> {
        self.0.get(&suspicion::skeleton(name)).map(String::as_str)
    }
}

/// What differs from what was approved.
pub(crate) fn diff(row: &McpServerRow, taken: &Taken) -> McpDiff {
    let by_name = |items: &[McpItem]| -> BTreeMap<_, _> {
        items.iter().map(|item| ((item.kind, item.name.clone()), item.clone())).collect()
    };
    let (approved, seen) = (by_name(&row.approved), by_name(&row.seen));
    let names: BTreeSet<_> = approved.keys().chain(seen.keys()).collect();
    let mut differences = Vec::new();
    for key in names {
        let (before, after) = (approved.get(key), seen.get(key));
        let change = match (before, after) {
            (Some(before), Some(after)) if before.digest == after.digest => continue,
            (Some(_), Some(_)) => McpChange::Changed,
            (None, _) => McpChange::New,
            (Some(_), None) => McpChange::Removed,
        };
        differences.push(McpDifference {
            kind: key.0,
            name: suspicion::shown(&key.1),
            change,
            before: before.map(|item| suspicion::shown_json(&item.value)),
            after: after.map(|item| suspicion::shown_json(&item.value)),
            flags: after.map(|item| flags(row, item, taken)).unwrap_or_default(),
            rejected: after.is_some_and(|item| row.rejected.contains(&item.digest)),
        });
    }
    McpDiff { digest: digest_of(&row.seen), differences }
}

fn flags(row: &McpServerRow, item: &McpItem, taken: &Taken) -> Vec<McpFlag> {
    let mut flags = Vec::new();
    if let Some(what) = suspicion::invisible(&item.value) {
        flags.push(McpFlag::Invisible(what));
    }
    if !matches!(item.kind, McpItemKind::Tool | McpItemKind::Prompt) {
        return flags;
    }
    if let Some(why) = suspicion::bad_name(row.name.as_str(), &item.name) {
        flags.push(McpFlag::BadName(why));
    }
    let skeleton = suspicion::skeleton(&item.name);
    let twin = row.seen.iter().find(|other| {
        other.kind == item.kind
            && other.name != item.name
            && suspicion::skeleton(&other.name) == skeleton
    });
    if let Some(other) = taken.like(&item.name) {
        flags.push(McpFlag::LooksLike(other.to_owned()));
    } else if let Some(twin) = twin {
        let twin = format!("{} of the same server", suspicion::shown(&twin.name));
        flags.push(McpFlag::LooksLike(twin));
    }
    flags
}

/// What is approved and what stays rejected, by digest, when these differences are approved. With the first of
/// them goes who the server says it is.
pub(crate) fn approve(
    row: &McpServerRow,
    taken: &Taken,
    wanted: &DecideMcpItems,
) -> Result<(Vec<McpItem>, Vec<String>)> {
    let nobody = identity(&row.approved).is_none();
    let chosen = looked_at(row, taken, wanted)?.into_iter().filter(|it| {
        let identity = nobody && it.kind == McpItemKind::Identity;
        // What was rejected is approved by its name only.
        let meant = (wanted.names.is_empty() || identity) && !it.rejected;
        meant || wanted.names.contains(&it.name)
    });
    let chosen: Vec<_> = chosen.collect();
    refuse_unknown(row, wanted, chosen.iter().map(|it| it.name.as_str()))?;
    let mut approved: BTreeMap<_, _> =
        row.approved.iter().map(|item| ((item.kind, item.name.clone()), item.clone())).collect();
    for difference in &chosen {
        for flag in &difference.flags {
            refuse_flagged(difference, flag, wanted)?;
        }
        let is_it = |item: &&McpItem| {
            item.kind == difference.kind && suspicion::shown(&item.name) == difference.name
        };
        match row.seen.iter().find(is_it) {
            Some(_) if difference.flags.iter().any(|flag| matches!(flag, McpFlag::BadName(_))) => {}
            Some(item) => {
                approved.insert((item.kind, item.name.clone()), item.clone());
            }
            None => approved.retain(|(kind, name), _| {
                *kind != difference.kind || suspicion::shown(name) != difference.name
            }),
        }
    }
    let approved: Vec<_> = approved.into_values().collect();
    let is_approved = |digest: &String| approved.iter().any(|item| item.digest == *digest);
    let rejected = row.rejected.iter().filter(|digest| !is_approved(digest)).cloned().collect();
    Ok((approved, rejected))
}

/// What stays approved and what is rejected, by digest. Who a server was approved as stays, when it says that it
/// is another one and that is rejected: else that one could say another thing, and be let through.
pub(crate) fn reject(
    row: &McpServerRow,
    taken: &Taken,
    wanted: &DecideMcpItems,
) -> Result<(Vec<McpItem>, Vec<String>)> {
    let differing: BTreeSet<_> =
        looked_at(row, taken, wanted)?.into_iter().map(|it| (it.kind, it.name)).collect();
    let is_chosen = |item: &&McpItem| {
        let name = suspicion::shown(&item.name);
        match wanted.names.is_empty() {
            true => differing.contains(&(item.kind, name)),
            false => wanted.names.contains(&name),
        }
    };
    let chosen: Vec<_> = row.seen.iter().chain(&row.approved).filter(is_chosen).collect();
    let names: Vec<_> = chosen.iter().map(|item| suspicion::shown(&item.name)).collect();
    refuse_unknown(row, wanted, names.iter().map(String::as_str))?;
    let mut rejected = row.rejected.clone();
    rejected.extend(row.seen.iter().filter(is_chosen).map(|item| item.digest.clone()));
    rejected.sort();
    rejected.dedup();
    // No more than can be shown at a time: older ones were of items that are gone.
    rejected.retain(|digest| row.seen.iter().any(|item| item.digest == *digest));
    let stays = |item: &&McpItem| {
        let another = item.kind == McpItemKind::Identity && !rejected.contains(&item.digest);
        !is_chosen(item) || another
    };
    let approved = row.approved.iter().filter(stays).cloned().collect();
    Ok((approved, rejected))
}

/// What differs, if that is what the digest was of.
fn looked_at(
    row: &McpServerRow,
    taken: &Taken,
    wanted: &DecideMcpItems,
) -> Result<Vec<McpDifference>> {
    let now = diff(row, taken);
    if now.digest != wanted.digest {
        let message = format!("{} shows something else than what this digest was of", row.name);
        let hint = format!("look again: torpor gateway diff {}", row.name);
        return Err(Error::with_hint(ErrorCode::InUse, message, hint));
    }
    Ok(now.differences)
}

fn refuse_unknown<'a>(
    row: &McpServerRow,
    wanted: &DecideMcpItems,
    chosen: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let chosen: BTreeSet<_> = chosen.collect();
    match wanted.names.iter().find(|name| !chosen.contains(name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let message = format!("there is nothing called {name} to decide about at {}", row.name);
            Err(Error::new(ErrorCode::NotFound, message))
        }
    }
}

fn refuse_flagged(of: &McpDifference, flag: &McpFlag, wanted: &DecideMcpItems) -> Result<()> {
    let (why, hint) = match flag {
        McpFlag::Invisible(_) if wanted.allow_invisible => return Ok(()),
        McpFlag::LooksLike(_) if wanted.allow_lookalikes => return Ok(()),
        // Where all were meant it stays back, and the rest goes on.
        McpFlag::BadName(_) if wanted.names.is_empty() => return Ok(()),
        McpFlag::Invisible(what) => (
            format!("has invisible characters ({what})"),
            "if they belong there: --allow-invisible",
        ),
        McpFlag::LooksLike(other) => (
            format!("is called like {other}, or looks so"),
            "approve others with --tool, or this one with --allow-lookalikes",
        ),
        McpFlag::BadName(why) => (why.clone(), "it can't be passed on to clients"),
    };
    let message = format!("{} {} {why}", of.kind.as_str(), of.name);
    Err(Error::with_hint(ErrorCode::InvalidRequest, message, hint))
}

#[cfg(test)]
#[path = "pins_tests.rs"]
mod tests;
