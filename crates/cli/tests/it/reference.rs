//! The reference of the command line is what the program says of itself.

use std::path::Path;

#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/cli.md");
    let generated = torpor_cli::markdown();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, &generated).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == generated, "run `UPDATE=1 cargo test -p torpor-cli` and commit");
}
