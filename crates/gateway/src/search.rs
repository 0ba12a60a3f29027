//! Finding tools by words: BM25 over names, descriptions and names of parameters.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Value, json};

/// How often a word counts more, and how much long texts count less: what everybody uses.
const K1: f64 = 1.2;
const B: f64 = 0.75;
/// A word in the name says more than one in a description.
const NAME_WEIGHT: usize = 3;
/// Hits of one answer.
pub(crate) const HITS: usize = 8;
pub(crate) const HITS_MAX: usize = 30;
/// Words of a query that are looked for.
const WORDS_MAX: usize = 64;
/// Characters of a description in an answer.
const SHORT: usize = 160;

/// The tools of search mode.
pub(crate) const FIND: &str = "find_tools";
pub(crate) const DESCRIBE: &str = "describe_tool";
pub(crate) const CALL: &str = "call_tool";

/// A list of tools, searched. Made anew for each search: a list has some hundred tools.
struct Index<'a> {
    tools: &'a [Value],
    /// How often each word stands in each tool.
    counts: Vec<HashMap<String, usize>>,
    lengths: Vec<usize>,
}

/// The tools that a text is about, best first, each by name with the beginning of its description.
pub(crate) fn find(tools: &[Value], query: &str, limit: usize) -> Vec<Value> {
    let index = Index::of(tools);
    let mut ranked: Vec<_> = index.scores(query).into_iter().enumerate().collect();
    ranked.retain(|(_, score)| *score > 0.0);
    ranked.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let hit = |(at, _): (usize, f64)| {
        let text = tools[at]["description"].as_str().unwrap_or_default();
        json!({ "name": tools[at]["name"], "description": short(text) })
    };
    ranked.into_iter().take(limit).map(hit).collect()
}

fn short(text: &str) -> String {
    let line = text.split('\n').next().unwrap_or_default();
    let mut short: String = line.chars().take(SHORT).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

impl<'a> Index<'a> {
    fn of(tools: &'a [Value]) -> Self {
        let mut counts = Vec::with_capacity(tools.len());
        let mut lengths = Vec::with_capacity(tools.len());
        for tool in tools {
            let mut count = HashMap::new();
            let name = tool["name"].as_str().unwrap_or_default();
            for _ in 0..NAME_WEIGHT {
                add(&mut count, name);
            }
            for field in ["title", "description"] {
                add(&mut count, tool[field].as_str().unwrap_or_default());
            }
            for (name, schema) in
                tool["inputSchema"]["properties"].as_object().into_iter().flatten()
            {
                add(&mut count, name);
                add(&mut count, schema["description"].as_str().unwrap_or_default());
            }
            lengths.push(count.values().sum());
            counts.push(count);
        }
        Self { tools, counts, lengths }
    }

    fn scores(&self, query: &str) -> Vec<f64> {
        let count = self.tools.len() as f64;
        let average = self.lengths.iter().sum::<usize>() as f64 / count.max(1.0);
        let wanted: BTreeSet<_> = words(query).take(WORDS_MAX).collect();
        let mut scores = vec![0.0; self.tools.len()];
        for word in wanted {
            let having =
                self.counts.iter().filter(|count| count.contains_key(&word)).count() as f64;
            let rarity = ((count - having + 0.5) / (having + 0.5)).ln_1p();
            for (at, counts) in self.counts.iter().enumerate() {
                let often = counts.get(&word).copied().unwrap_or(0) as f64;
                let length = 1.0 - B + B * self.lengths[at] as f64 / average.max(1.0);
                scores[at] += rarity * often * (K1 + 1.0) / (often + K1 * length);
            }
        }
        scores
    }
}

fn add(counts: &mut HashMap<String, usize>, text: &str) {
    for word in words(text) {
        *counts.entry(word).or_default() += 1;
    }
}

/// Words in lower case, without the ending of a plural; `readFile` and `read_file` are two words.
fn words(text: &str) -> impl Iterator<Item = String> {
    let mut apart = String::with_capacity(text.len() + 8);
    let mut small = false;
    for c in text.chars() {
        if small && c.is_uppercase() {
            apart.push(' ');
        }
        small = c.is_lowercase();
        apart.extend(c.to_lowercase());
    }
    let apart: Vec<String> = apart
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(|word| match word.strip_suffix('s') {
            Some(stem) if stem.len() > 3 && !stem.ends_with('s') => stem.to_owned(),
            Some(_) | None => word.to_owned(),
        })
        .collect();
    apart.into_iter()
}

/// What search mode lists instead of all tools.
pub(crate) fn tools() -> Vec<Value> {
    let object = |properties: Value, required: Value| json!({ "type": "object", "properties": properties, "required": required });
    let name = json!({ "type": "string", "description": "Name of a tool that find_tools gave" });
    vec![
        json!({
            "name": CALL, "description": "Call a tool by its name. Get its parameters with describe_tool first.",
            "inputSchema": object(json!({ "name": name, "arguments": { "type": "object" } }), json!(["name"])),
        }),
        json!({
            "name": DESCRIBE, "description": "Get the full definition of a tool: its parameters and what it does.",
            "inputSchema": object(json!({ "name": name }), json!(["name"])),
            "annotations": { "readOnlyHint": true },
        }),
        json!({
            "name": FIND,
            "description": "Find tools by what they do. Many more tools are there than are listed here.",
            "inputSchema": object(
                json!({
                    "query": { "type": "string", "description": "Words about what is to be done" },
                    "limit": { "type": "integer", "minimum": 1, "maximum": HITS_MAX, "default": HITS },
                }),
                json!(["query"]),
            ),
            "annotations": { "readOnlyHint": true },
        }),
    ]
}

/// What a list costs a model: tokens of JSON have about four bytes.
pub(crate) fn tokens(tools: &[Value]) -> u64 {
    let bytes: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
    u64::try_from(bytes.div_ceil(4)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(query: &str) -> Vec<String> {
        let tool = |name: &str, text: &str, parameter: &str| {
            let properties = json!({ parameter: { "type": "string" } });
            json!({"name": name, "description": text, "inputSchema": {"properties": properties}})
        };
        let tools = [
            tool("git_log", "Shows the commits of a branch", "repo_path"),
            tool("fs_readFile", "Reads a file", "path"),
            tool("fs_write_file", "Writes a file and its directories", "path"),
            tool("time_convert", "Converts a time between time zones", "timezone"),
        ];
        let hits = find(&tools, query, 8);
        hits.iter().map(|hit| hit["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn tools_are_found_by_names_descriptions_and_parameters() {
        assert_eq!(names("read a file")[0], "fs_readFile");
        assert_eq!(names("commit history of branches"), ["git_log"]);
        assert_eq!(names("timezone")[0], "time_convert");
        assert_eq!(names("nothing that fits"), ["git_log"; 0]);
    }

    #[test]
    fn a_description_is_cut_in_hits() {
        assert_eq!(short("one\ntwo"), "one…");
        assert_eq!(short(&"ä".repeat(500)).chars().count(), SHORT + 1);
    }
}
