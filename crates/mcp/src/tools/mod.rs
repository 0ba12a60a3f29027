//! The tools: of one sandbox, and of the server above all sandboxes.
//!
//! Names are short, because clients put the name of the server before them, and few, because a model chooses
//! worse among many.

mod control;
mod files;
mod life;
mod processes;
mod search;
mod shown;

use std::sync::LazyLock;

use crate::run::Run;
use crate::tool::Toolset;

/// Of one sandbox.
pub(crate) static SANDBOX: LazyLock<Toolset> = LazyLock::new(|| {
    Toolset::new(
        "Tools of one sandbox: an isolated Linux computer whose files and processes stay. It falls asleep \
         when nobody uses it, and every call wakes it as it was. Paths are absolute. Output is bounded: \
         what is left out is said. A command that outlives its call goes on as a process.",
    )
    .with::<Run>()
    .with::<processes::ProcessList>()
    .with::<processes::ProcessLogs>()
    .with::<processes::ProcessInput>()
    .with::<processes::ProcessStop>()
    .with::<files::ReadFile>()
    .with::<files::WriteFile>()
    .with::<files::EditFile>()
    .with::<files::ListFiles>()
    .with::<files::DeleteFile>()
    .with::<search::FindFiles>()
    .with::<search::Grep>()
    .with::<life::CreatePreview>()
    .with::<life::TakeSnapshot>()
    .with::<life::ForkSandbox>()
    .with::<life::ShowStatus>()
});

/// Of the server above all sandboxes.
pub(crate) static CONTROL: LazyLock<Toolset> = LazyLock::new(|| {
    Toolset::new(
        "Manages sandboxes: isolated Linux computers that sleep when nobody uses them and wake as they \
         were. Create one, run commands in it, and let it sleep; it keeps its files and processes. Name \
         what should be found again. Each sandbox also has an MCP server of its own with more tools, at \
         /v1/sandboxes/{sandbox}/mcp.",
    )
    .with::<control::Create>()
    .with::<control::List>()
    .with::<control::Inspect>()
    .with::<control::RunIn>()
    .with::<control::ReadIn>()
    .with::<control::WriteIn>()
    .with::<control::Sleep>()
    .with::<control::Wake>()
    .with::<control::Snapshot>()
    .with::<control::Fork>()
    .with::<control::Remove>()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_has_few_tools_with_short_names_and_all_say_what_they_do() {
        let inside = SANDBOX.definitions();
        assert!(inside.len() <= 16, "{}", inside.len());
        for tool in inside.iter().chain(&CONTROL.definitions()) {
            assert!(tool.name.len() <= 16, "{}", tool.name);
            assert!(tool.description.as_ref().is_some_and(|text| text.len() > 30), "{}", tool.name);
            assert_eq!(tool.input_schema.get("type"), Some(&"object".into()), "{}", tool.name);
            let output = tool.output_schema.as_ref().unwrap();
            assert_eq!(output.get("type"), Some(&"object".into()), "{}", tool.name);
            let hints = tool.annotations.as_ref().unwrap();
            assert!(hints.read_only_hint.is_some() && hints.open_world_hint.is_some());
        }
        assert!(CONTROL.definitions().iter().all(|tool| tool.name.starts_with("sandbox_")));
    }

    #[test]
    fn every_argument_is_explained() {
        for tool in SANDBOX.definitions().iter().chain(&CONTROL.definitions()) {
            let Some(properties) = tool.input_schema.get("properties") else { continue };
            for (name, schema) in properties.as_object().unwrap() {
                assert!(schema.get("description").is_some(), "{} of {}", name, tool.name);
            }
        }
    }
}
