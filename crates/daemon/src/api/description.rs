//! What the description of the API says about all routes alike, so that no handler has to, in the form that
//! generators of clients want: names of their own for operations and schemas, a discriminator for every choice.

use serde_json::{Map, Value, json};
use torpor_protocol::ErrorBody;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{InfoBuilder, OpenApi, OpenApiBuilder};
use utoipa::{PartialSchema, ToSchema};

use super::operations::OPERATIONS;

/// Schemas whose names in the code say less, or something else, to who sees the description only.
const RENAMED: [(&str, &str); 11] = [
    ("Status", "Sandbox"),
    ("State", "SandboxState"),
    ("Tier", "SandboxTier"),
    ("Step", "StartStep"),
    ("ErrorBody", "Error"),
    ("Fork", "ForkRequest"),
    ("Sleep", "SleepRequest"),
    ("Log", "LogList"),
    ("EgressEvents", "EgressEventList"),
    ("UsageReport", "Usage"),
    ("Supervision", "Supervise"),
];
/// Fields that tell the kinds of a choice apart.
const TAGS: [&str; 3] = ["event", "kind", "flag"];
const SCHEMAS: &str = "#/components/schemas/";

/// What stands before the routes.
pub(super) fn begin() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Torpor")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Sandboxes for agents. {sandbox} and {snapshot} are an id or a name everywhere. Every answer has the \
             header x-request-id; every error has the body Error. A POST with an Idempotency-Key may be repeated.",
        ))
        .build();
    let mut openapi = OpenApiBuilder::new().info(info).build();
    let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
    let components = openapi.components.get_or_insert_default();
    components.add_security_scheme("key", scheme);
    let mut schemas = Vec::new();
    ErrorBody::schemas(&mut schemas);
    schemas.push(("ErrorBody".to_owned(), ErrorBody::schema()));
    components.schemas.extend(schemas);
    // On loopback without keys none is needed.
    openapi.security =
        Some(vec![SecurityRequirement::default(), SecurityRequirement::new("key", [""; 0])]);
    openapi
}

/// What is known once all routes are there.
pub(super) fn complete(openapi: &OpenApi) -> Value {
    let mut api = serde_json::to_value(openapi).unwrap_or_default();
    for (path, item) in object(&mut api["paths"]) {
        for (method, operation) in object(item) {
            name(operation, method, path);
            add_errors(operation);
            free_lists(operation);
            if method == "post" {
                add_idempotency(operation);
            }
        }
    }
    let schemas = object(&mut api["components"]["schemas"]);
    let pairs = schemas.remove("BTreeMap");
    name_choices(schemas);
    for (from, to) in RENAMED {
        if let Some(schema) = schemas.remove(from) {
            schemas.insert(to.to_owned(), schema);
        }
    }
    refine(&mut api, pairs.as_ref());
    api
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    value.as_object_mut().expect("it was made one")
}

/// What a path is about: `processes` for `/v1/sandboxes/{sandbox}/processes/{pid}/stdin`.
fn noun(path: &str) -> &str {
    let mut fixed = path.split('/').skip(2).filter(|part| !part.starts_with('{'));
    let first = fixed.next().unwrap_or_default();
    if first != "sandboxes" {
        return first;
    }
    fixed.find(|part| ["files", "processes", "previews"].contains(part)).unwrap_or(first)
}

fn name(operation: &mut Value, method: &str, path: &str) {
    let place = format!("{method} {path}");
    let id = OPERATIONS.iter().find(|(of, _)| *of == place).map(|(_, id)| *id);
    operation["operationId"] = json!(id);
    operation["tags"] = json!([noun(path)]);
}

/// Every operation fails in the same form.
fn add_errors(operation: &mut Value) {
    operation["responses"]["default"] = json!({
        "description": "It was not done; `code` says why.",
        "content": {"application/json": {"schema": {"$ref": format!("{SCHEMAS}ErrorBody")}}},
    });
}

fn add_idempotency(operation: &mut Value) {
    let header = json!({
        "name": "Idempotency-Key", "in": "header", "required": false,
        "description": "Chosen by the client, for this request only: sent again with it, the same request is \
                        done once and answered alike, for 24 hours.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
    });
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(header),
        None => operation["parameters"] = json!([header]),
    }
}

/// A parameter that may be repeated may also be left out.
fn free_lists(operation: &mut Value) {
    for parameter in operation["parameters"].as_array_mut().into_iter().flatten() {
        if parameter["in"] == "query" && parameter["schema"]["type"] == "array" {
            parameter["required"] = json!(false);
        }
    }
}

/// Gives every kind of a choice a schema of its own, and the choice a discriminator.
fn name_choices(schemas: &mut Map<String, Value>) {
    let mut named = Vec::new();
    for (name, schema) in schemas.iter_mut() {
        if one_field(schema) {
            continue;
        }
        let Some(Value::Array(kinds)) = schema.get_mut("oneOf") else { continue };
        let (mut mapping, mut field) = (Map::new(), TAGS[0]);
        for kind in kinds {
            let Some((of, tag)) = tag_of(kind) else { continue };
            let tag = tag.to_owned();
            field = of;
            let own = format!("{name}{}", capitalized(&tag));
            let reference = format!("{SCHEMAS}{own}");
            mapping.insert(tag, json!(reference));
            named.push((own, std::mem::replace(kind, json!({"$ref": reference}))));
        }
        schema["discriminator"] = json!({"propertyName": field, "mapping": mapping});
    }
    schemas.extend(named);
}

/// A choice between objects of one field each becomes an object with one of these fields; whether it was such a choice.
fn one_field(schema: &mut Value) -> bool {
    let Some(kinds) = schema["oneOf"].as_array() else { return false };
    let field_of = |kind: &Value| {
        let fields = kind["properties"].as_object().filter(|fields| fields.len() == 1)?;
        let (name, field) = fields.iter().next()?;
        field["enum"].is_null().then(|| (name.clone(), field.clone()))
    };
    let Some(fields) = kinds.iter().map(field_of).collect::<Option<Map<_, _>>>() else {
        return false;
    };
    // It may be flattened into another object, which has more fields.
    let description = schema["description"].as_str().unwrap_or("One of these fields.");
    *schema = json!({"type": "object", "description": description, "properties": fields});
    true
}

/// The field that says which kind it is, and its value, of an object or of an object with something flattened into it.
fn tag_of(kind: &Value) -> Option<(&'static str, &str)> {
    let parts = kind["allOf"].as_array().map_or(std::slice::from_ref(kind), Vec::as_slice);
    let tagged = |field: &'static str| {
        let value = parts.iter().find_map(|part| part["properties"][field]["enum"][0].as_str())?;
        Some((field, value))
    };
    TAGS.into_iter().find_map(tagged)
}

fn capitalized(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect()
}

/// Names and forms that are the same everywhere.
fn refine(value: &mut Value, pairs: Option<&Value>) {
    match value {
        Value::Object(map) => {
            if map.get("$ref").and_then(Value::as_str) == Some("#/components/schemas/BTreeMap") {
                *value = pairs.cloned().unwrap_or_default();
                return refine(value, None);
            }
            if let Some(Value::String(reference)) = map.get_mut("$ref") {
                rename(reference);
            }
            // No generator needs to be told that keys are text.
            map.remove("propertyNames");
            or_null(map);
            map.values_mut().for_each(|value| refine(value, pairs));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| refine(value, pairs)),
        Value::String(text) if text.starts_with(SCHEMAS) => rename(text),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn rename(reference: &mut String) {
    let renamed = RENAMED.iter().find(|(from, _)| reference.strip_prefix(SCHEMAS) == Some(from));
    if let Some((_, to)) = renamed {
        *reference = format!("{SCHEMAS}{to}");
    }
}

/// A schema or null is no choice between kinds.
fn or_null(map: &mut Map<String, Value>) {
    let Some(Value::Array(kinds)) = map.get("oneOf") else { return };
    let null = json!({"type": "null"});
    let [first, other] = kinds.as_slice() else { return };
    if *first != null && *other != null {
        return;
    }
    let real = if *first == null { other.clone() } else { first.clone() };
    map.remove("oneOf");
    map.insert("anyOf".to_owned(), Value::Array(vec![real, null]));
}
