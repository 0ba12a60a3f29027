//! The steps that make the ledger's tables, oldest first; none is ever changed. They are listed by hand,
//! because `sqlx::migrate!` would have every build compile SQLite and sqlx a second time, for the macro.

use std::sync::LazyLock;

use sqlx::SqlSafeStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

/// Names of the files in `migrations/` (`NNNN_name.sql`) with their text.
macro_rules! steps {
    ($($file:literal),* $(,)?) => {
        [$(($file, include_str!(concat!("../../../migrations/", $file, ".sql")))),*]
    };
}

static STEPS: &[(&str, &str)] = &steps![
    "0001_ledger",
    "0002_saves",
    "0003_archive",
    "0004_egress",
    "0005_previews",
    "0006_domains",
    "0007_keys",
    "0008_requests",
    "0010_reasons",
    "0011_owners",
    "0012_blobs",
    "0013_pages",
    "0014_epochs",
    "0015_work_failures",
    "0016_layers",
    "0017_build_cache",
    "0018_volumes",
    "0019_homes",
    "0020_jobs",
    "0021_events",
    "0022_schedules",
    "0023_services",
    "0024_mcp_tasks",
    "0025_gateway",
    "0026_callbacks",
    "0027_outbox",
    "0028_job_bounds",
];

pub(super) static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let steps = STEPS.iter().map(|(file, sql)| {
        let kind = MigrationType::Simple;
        Migration::new(number(file), (*file).into(), kind, sql.into_sql_str(), false)
    });
    Migrator::with_migrations(steps.collect())
});

/// What a file's name begins with.
fn number(file: &str) -> i64 {
    file.bytes().take_while(u8::is_ascii_digit).fold(0, |n, digit| n * 10 + i64::from(digit - b'0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_a_step_with_a_number_of_its_own() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
        let files = std::fs::read_dir(dir).unwrap().flatten();
        let mut files: Vec<_> = files.map(|file| file.file_name().into_string().unwrap()).collect();
        files.sort();
        let listed: Vec<_> = STEPS.iter().map(|(file, _)| format!("{file}.sql")).collect();
        assert_eq!(files, listed);
        let numbers: Vec<_> = STEPS.iter().map(|(file, _)| number(file)).collect();
        assert!(numbers.is_sorted_by(|one, next| one < next) && numbers[0] == 1, "{numbers:?}");
    }
}
