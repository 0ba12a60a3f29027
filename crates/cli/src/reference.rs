//! The reference of the command line, `docs/guide/cli.md`, from the same definitions as `--help`.

use std::fmt::Write;

use clap::Command;

use crate::commands::Cli;

/// Every verb with its help text, as Markdown.
pub fn markdown() -> String {
    let mut root = Cli::definition().term_width(100);
    root.build();
    let mut text = String::from(
        "# Command line\n\n\
         Generated from the program's own help; a test keeps it current (`UPDATE=1 cargo test -p \
         torpor-cli` writes it anew).\n",
    );
    section(&mut text, &mut root, "torpor");
    text
}

fn section(text: &mut String, command: &mut Command, name: &str) {
    let help = command.render_long_help().to_string();
    let help = help.lines().map(str::trim_end).collect::<Vec<_>>().join("\n");
    write!(text, "\n## {name}\n\n```text\n{}\n```\n", help.trim_end())
        .expect("a string takes any text");
    for sub in command.get_subcommands_mut() {
        if !sub.is_hide_set() && sub.get_name() != "help" {
            let name = format!("{name} {}", sub.get_name());
            section(text, sub, &name);
        }
    }
}
