//! Operations out of an OpenAPI document, and what clients are told of them.
//!
//! References to schemas stay references, into `$defs` of the tool, with all that they lead to: so cycles are no
//! trouble, and nothing is written out twice.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

const METHODS: [&str; 7] = ["get", "put", "post", "delete", "patch", "head", "options"];
const SCHEMAS: &str = "#/components/schemas/";
/// References of parameters and bodies that lead to one another.
const HOPS_MAX: usize = 8;
/// Levels of one schema.
const DEPTH_MAX: usize = 64;
/// Schemas that one tool may refer to.
const DEFS_MAX: usize = 200;
const OPERATIONS_MAX: usize = 1000;
/// Bytes of all tools: what they share is written into each.
const TOOLS_MAX: usize = 8 << 20;
/// What a request of an operation is: pinned with the tool, so that it can't become another behind its name.
const REQUEST: &str = "dev.torpor/request";
/// Characters of a tool's name, besides the server's.
const NAME_MAX: usize = 64;

pub(super) struct Operation {
    pub(super) name: String,
    pub(super) method: String,
    /// With its places for parameters.
    pub(super) path: String,
    description: String,
    /// By place and name.
    parameters: BTreeMap<(String, String), Parameter>,
    body: Option<Parameter>,
    pub(super) has_body: bool,
    defs: Map<String, Value>,
}

struct Parameter {
    schema: Value,
    required: bool,
}

impl Operation {
    pub(super) fn parameters<'a>(&'a self, place: &'a str) -> impl Iterator<Item = &'a str> {
        self.parameters.keys().filter(move |(its, _)| its == place).map(|(_, name)| name.as_str())
    }

    /// As MCP has it.
    pub(super) fn tool(&self) -> Value {
        let mut properties = Map::new();
        let mut required = Vec::new();
        for place in ["path", "query", "header"] {
            let of_place = self.parameters.iter().filter(|((its, _), _)| its == place);
            let (mut inner, mut needed) = (Map::new(), Vec::new());
            for ((_, name), parameter) in of_place {
                inner.insert(name.clone(), parameter.schema.clone());
                if parameter.required {
                    needed.push(name.clone());
                }
            }
            if inner.is_empty() {
                continue;
            }
            if !needed.is_empty() {
                required.push(place);
            }
            let schema = json!({
                "type": "object", "properties": inner, "required": needed, "additionalProperties": false,
            });
            properties.insert(place.to_owned(), schema);
        }
        if let Some(body) = &self.body {
            properties.insert("body".to_owned(), body.schema.clone());
            if body.required {
                required.push("body");
            }
        }
        let mut schema = json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        });
        if !self.defs.is_empty() {
            schema["$defs"] = Value::Object(self.defs.clone());
        }
        let reads = matches!(self.method.as_str(), "GET" | "HEAD" | "OPTIONS");
        json!({
            "name": self.name, "description": self.description, "inputSchema": schema,
            "annotations": { "readOnlyHint": reads, "destructiveHint": !reads, "openWorldHint": true },
            "_meta": { REQUEST: format!("{} {}", self.method, self.path) },
        })
    }
}

/// The operations whose names are wanted, in the order of their names; what is wrong with the document otherwise.
pub(super) fn operations(
    document: &Value,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Operation>, String> {
    if !document["openapi"].as_str().is_some_and(|version| version.starts_with("3.")) {
        return Err("that is no OpenAPI 3 document (JSON)".to_owned());
    }
    let paths = document["paths"].as_object().ok_or("it has no paths")?;
    let (mut all, mut names, mut bytes) = (Vec::new(), BTreeMap::new(), 0);
    for (path, item) in paths {
        if !path.starts_with('/') {
            return Err(format!("the path {path} does not begin with /"));
        }
        let item = resolved(document, item)?;
        for method in METHODS {
            let Some(operation) = item.get(method).filter(|it| it.is_object()) else { continue };
            let name = free_name(&given_name(method, path, operation), &mut names);
            if !wanted(&name) {
                continue;
            }
            let reader = Reader { document, defs: Map::new() };
            let read = reader.operation(name, method, path, item, operation)?;
            bytes += read.tool().to_string().len();
            all.push(read);
            if all.len() > OPERATIONS_MAX || bytes > TOOLS_MAX {
                return Err(format!(
                    "its tools are more than {OPERATIONS_MAX}, or have more than {TOOLS_MAX} bytes; choose \
                     some with `operations`"
                ));
            }
        }
    }
    all.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(all)
}

fn given_name(method: &str, path: &str, operation: &Value) -> String {
    match operation["operationId"].as_str().unwrap_or_default() {
        "" => format!("{method}{}", path.replace(['{', '}'], "")),
        id => id.to_owned(),
    }
}

/// What a `$ref` leads to, within the document.
fn resolved<'a>(document: &'a Value, mut value: &'a Value) -> Result<&'a Value, String> {
    for _ in 0..HOPS_MAX {
        let Some(to) = value.get("$ref").and_then(Value::as_str) else { return Ok(value) };
        let pointer = to.strip_prefix('#').ok_or_else(|| format!("{to} is not in the document"))?;
        value = document.pointer(pointer).ok_or_else(|| format!("{to} leads nowhere"))?;
    }
    Err("its references go round in circles".to_owned())
}

/// As clients take it, and not taken yet. With each name, how many there are that want to be called so.
fn free_name(wanted: &str, names: &mut BTreeMap<String, usize>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '_' };
    let base: String = wanted.chars().map(plain).take(NAME_MAX).collect();
    let base = base.trim_matches('_').to_owned();
    let mut name = base.clone();
    while name.is_empty() || names.contains_key(&name) {
        let number = names.entry(base.clone()).or_insert(1);
        *number += 1;
        name = format!("{base}_{number}");
    }
    names.insert(name.clone(), 1);
    name
}

struct Reader<'a> {
    document: &'a Value,
    defs: Map<String, Value>,
}

impl Reader<'_> {
    fn operation(
        mut self,
        name: String,
        method: &str,
        path: &str,
        item: &Value,
        operation: &Value,
    ) -> Result<Operation, String> {
        let mut parameters = BTreeMap::new();
        // Those of the operation replace those of the path.
        for list in [&item["parameters"], &operation["parameters"]] {
            for parameter in list.as_array().into_iter().flatten() {
                let parameter = resolved(self.document, parameter)?;
                let text = |field: &str| parameter[field].as_str().unwrap_or_default().to_owned();
                let (place, name) = (text("in"), text("name"));
                if !matches!(place.as_str(), "path" | "query" | "header") || is_ours(&place, &name)
                {
                    continue;
                }
                let mut schema = self.schema(&parameter["schema"], 0)?;
                describe(&mut schema, parameter);
                let required = place == "path" || parameter["required"] == true;
                parameters.insert((place, name), Parameter { schema, required });
            }
        }
        let body = self.body(operation)?;
        let text = |field: &str| operation[field].as_str().unwrap_or_default();
        let mut description = [text("summary"), text("description")].join("\n\n").trim().to_owned();
        if description.is_empty() {
            description = format!("{} {path}", method.to_uppercase());
        }
        Ok(Operation {
            name,
            method: method.to_uppercase(),
            path: path.to_owned(),
            description,
            parameters,
            has_body: body.is_some(),
            body,
            defs: self.defs,
        })
    }

    /// A body of JSON; of others the text is sent as it is given, which is not supported.
    fn body(&mut self, operation: &Value) -> Result<Option<Parameter>, String> {
        let Some(body) = operation.get("requestBody") else { return Ok(None) };
        let body = resolved(self.document, body)?;
        let json = body["content"].as_object().into_iter().flatten();
        let json = json.filter(|(kind, _)| {
            let kind = kind.split(';').next().unwrap_or_default();
            kind == "application/json" || kind.ends_with("+json") || kind == "*/*"
        });
        let Some((_, media)) = json.into_iter().next() else { return Ok(None) };
        let mut schema = self.schema(&media["schema"], 0)?;
        describe(&mut schema, body);
        Ok(Some(Parameter { schema, required: body["required"] == true }))
    }

    /// The schema with its references led to `$defs`.
    fn schema(&mut self, schema: &Value, depth: usize) -> Result<Value, String> {
        if depth > DEPTH_MAX {
            return Err(format!("a schema has more than {DEPTH_MAX} levels"));
        }
        match schema {
            Value::Object(fields) => {
                let mut copy = Map::new();
                for (name, value) in fields {
                    let value = match (name.as_str(), value.as_str()) {
                        ("$ref", Some(to)) => Value::from(self.definition(to)?),
                        // The same schema, in words that JSON Schema does not know.
                        ("discriminator" | "xml" | "externalDocs" | "example", _) => continue,
                        _ => self.schema(value, depth + 1)?,
                    };
                    copy.insert(name.clone(), value);
                }
                Ok(Value::Object(copy))
            }
            Value::Array(values) => {
                let copies = values.iter().map(|value| self.schema(value, depth + 1));
                Ok(Value::Array(copies.collect::<Result<_, _>>()?))
            }
            // Any value.
            Value::Null if depth == 0 => Ok(json!({})),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
                Ok(schema.clone())
            }
        }
    }

    fn definition(&mut self, to: &str) -> Result<String, String> {
        let name =
            to.strip_prefix(SCHEMAS).ok_or_else(|| format!("{to} is no schema of the document"))?;
        let here = format!("#/$defs/{name}");
        if self.defs.contains_key(name) {
            return Ok(here);
        }
        if self.defs.len() >= DEFS_MAX {
            return Err(format!("an operation refers to more than {DEFS_MAX} schemas"));
        }
        let found = self.document.pointer(&to[1..]).ok_or_else(|| format!("{to} leads nowhere"))?;
        // Before it is looked into: it may lead to itself.
        self.defs.insert(name.to_owned(), Value::Null);
        let schema = self.schema(found, 1)?;
        self.defs.insert(name.to_owned(), schema);
        Ok(here)
    }
}

/// Headers that are the gateway's to send.
fn is_ours(place: &str, name: &str) -> bool {
    let ours = [
        "accept",
        "authorization",
        "content-type",
        "content-length",
        "host",
        "connection",
        "cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    place == "header" && ours.contains(&name.to_ascii_lowercase().as_str())
}

fn describe(schema: &mut Value, of: &Value) {
    if let (Some(text), Some(fields)) = (of["description"].as_str(), schema.as_object_mut()) {
        fields.entry("description").or_insert_with(|| text.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Value {
        json!({
            "openapi": "3.0.3", "info": {"title": "T", "version": "1"},
            "servers": [{"url": "http://169.254.169.254"}],
            "paths": {
                "/pets/{id}": {
                    "parameters": [{"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}],
                    "get": {
                        "operationId": "get pet",
                        "parameters": [
                            {"name": "id", "in": "query", "schema": {"type": "integer"}},
                            {"name": "Authorization", "in": "header", "schema": {"type": "string"}},
                            {"$ref": "#/components/parameters/Trace"},
                        ],
                    },
                    "put": {"requestBody": {"required": true, "content": {"application/json": {
                        "schema": {"$ref": "#/components/schemas/Pet"}}}}},
                },
                "/pets": {"get": {"operationId": "get_pet"}},
            },
            "components": {
                "parameters": {"Trace": {"name": "x-trace", "in": "header", "schema": {"type": "string"}}},
                "schemas": {
                    "Pet": {"type": "object", "properties": {
                        "parent": {"$ref": "#/components/schemas/Pet"},
                        "kind": {"$ref": "#/components/schemas/Kind"},
                    }},
                    "Kind": {"enum": ["cat", "dog"]},
                    "Unused": {"type": "string"},
                },
            },
        })
    }

    fn named<'a>(all: &'a [Operation], name: &str) -> &'a Operation {
        all.iter().find(|operation| operation.name == name).unwrap_or_else(|| panic!("{name}"))
    }

    #[test]
    fn parameters_are_nested_by_place_and_names_are_what_clients_take() {
        let all = operations(&document(), |_| true).unwrap();
        let names: Vec<_> = all.iter().map(|operation| operation.name.as_str()).collect();
        assert_eq!(names, ["get_pet", "get_pet_2", "put_pets_id"]);
        let tool =
            all.iter().find(|it| it.path == "/pets/{id}" && it.method == "GET").unwrap().tool();
        let properties = &tool["inputSchema"]["properties"];
        assert_eq!(properties["path"]["properties"]["id"]["type"], "string");
        assert_eq!(properties["query"]["properties"]["id"]["type"], "integer");
        assert_eq!(properties["header"]["properties"], json!({"x-trace": {"type": "string"}}));
        assert_eq!(tool["inputSchema"]["required"], json!(["path"]));
    }

    #[test]
    fn schemas_that_lead_to_themselves_are_definitions_of_the_tool() {
        let all = operations(&document(), |_| true).unwrap();
        let schema = named(&all, "put_pets_id").tool()["inputSchema"].clone();
        assert_eq!(schema["properties"]["body"], json!({"$ref": "#/$defs/Pet"}));
        assert_eq!(schema["$defs"]["Pet"]["properties"]["parent"], json!({"$ref": "#/$defs/Pet"}));
        assert!(schema["$defs"].get("Kind").is_some() && schema["$defs"].get("Unused").is_none());
        assert!(jsonschema::options().build(&schema).is_ok());
    }

    #[test]
    fn what_a_request_of_a_tool_is_can_not_change_behind_its_name() {
        let tool = |method: &str, path: &str| {
            let operation = json!({"operationId": "remove", "summary": "Removes a draft"});
            let paths = json!({ path: { method: operation } });
            let document = json!({"openapi": "3.1.0", "paths": paths});
            operations(&document, |_| true).unwrap()[0].tool()
        };
        assert_ne!(tool("delete", "/drafts"), tool("delete", "/accounts"));
        assert_ne!(tool("delete", "/drafts"), tool("post", "/drafts"));
    }

    #[test]
    fn of_a_large_api_some_operations_are_chosen() {
        let many = (0..2000).map(|n| (format!("/p{n}"), json!({"get": {"operationId": "one"}})));
        let paths: Map<_, _> = many.collect();
        let document = json!({"openapi": "3.1.0", "paths": paths});
        assert!(operations(&document, |_| true).err().unwrap().contains("choose"));
        let chosen = operations(&document, |name| name == "one_7").unwrap();
        assert_eq!(chosen.len(), 1);

        // Each operation leads to the same large schemas.
        let schemas: Map<_, _> =
            (0..50).map(|n| (format!("S{n}"), json!({"description": "x".repeat(1000)}))).collect();
        let all: Vec<_> =
            (0..50).map(|n| json!({"$ref": format!("#/components/schemas/S{n}")})).collect();
        let body = json!({"content": {"application/json": {"schema": {"allOf": all}}}});
        let many = (0..500).map(|n| (format!("/p{n}"), json!({"post": {"requestBody": body}})));
        let paths: Map<_, _> = many.collect();
        let document =
            json!({"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}});
        assert!(operations(&document, |_| true).err().unwrap().contains("bytes"));
    }

    #[test]
    fn a_value_in_a_path_stays_one_segment() {
        let all = operations(&document(), |_| true).unwrap();
        let operation =
            all.iter().find(|it| it.path == "/pets/{id}" && it.method == "GET").unwrap();
        let target = |id: &str| {
            operation.target(&json!({"path": {"id": id}, "query": {"id": 7, "evil": 1}})).ok()
        };
        assert_eq!(target("a/../b?c#d").unwrap(), "/pets/a%2F..%2Fb%3Fc%23d?id=7");
        assert_eq!((target(".."), target("")), (None, None));
    }

    #[test]
    fn a_document_that_goes_too_deep_or_elsewhere_is_refused() {
        let mut deep = json!({});
        for _ in 0..90 {
            deep = json!({ "properties": { "a": deep } });
        }
        let body = |schema: Value| {
            let content = json!({"application/json": {"schema": schema}});
            let paths = json!({"/a": {"post": {"requestBody": {"content": content}}}});
            operations(&json!({"openapi": "3.1.0", "paths": paths}), |_| true).err().unwrap()
        };
        assert!(body(deep).contains("levels"));
        assert!(
            body(json!({"$ref": "http://169.254.169.254/x"})).contains("no schema of the document")
        );
        assert!(operations(&json!({"swagger": "2.0"}), |_| true).is_err());
    }
}
