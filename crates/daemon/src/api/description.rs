//! What the description of the API says about all routes alike, so that no handler has to.

use torpor_protocol::ErrorBody;
use utoipa::openapi::path::{Operation, ParameterIn};
use utoipa::openapi::schema::{Schema, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{ContentBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr};
use utoipa::openapi::{Required, Response};
use utoipa::{PartialSchema, ToSchema};

/// What stands before the routes.
pub(super) fn begin() -> OpenApi {
    let info = InfoBuilder::new()
        .title("Torpor")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Sandboxes for agents. {sandbox} and {snapshot} are an id or a name everywhere. Every answer has the \
             header x-request-id; every error has the body ErrorBody.",
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
pub(super) fn complete(mut openapi: OpenApi) -> OpenApi {
    for (path, item) in &mut openapi.paths.paths {
        let methods =
            [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in methods.into_iter().flatten() {
            name(operation, noun(path));
            add_errors(operation);
            free_lists(operation);
        }
    }
    openapi
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

/// Handlers of different nouns have the same verbs; ids must differ.
fn name(operation: &mut Operation, noun: &str) {
    let verb = operation.operation_id.take().unwrap_or_default();
    let id = if verb == noun { verb } else { format!("{noun}_{verb}") };
    operation.operation_id = Some(id);
    operation.tags = Some(vec![noun.to_owned()]);
}

/// Every operation fails in the same form.
fn add_errors(operation: &mut Operation) {
    let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ErrorBody"))).build();
    let mut response = Response::new("It was not done; `code` says why.");
    response.content.insert("application/json".to_owned(), RefOr::T(content));
    operation.responses.responses.insert("default".to_owned(), RefOr::T(response));
}

/// A parameter that may be repeated may also be left out.
fn free_lists(operation: &mut Operation) {
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else { continue };
        let list = matches!(
            &parameter.schema,
            Some(RefOr::T(Schema::Array(array)))
                if array.schema_type == SchemaType::Type(Type::Array)
        );
        if list && parameter.parameter_in == ParameterIn::Query {
            parameter.required = Required::False;
        }
    }
}
