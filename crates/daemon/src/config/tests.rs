//! How the configuration is put together.

use super::*;

fn with(
    toml: &str,
    variables: &[(&str, &str)],
    overrides: Overrides,
) -> Result<Config, ConfigError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), toml).unwrap();
    let variable = |name: &str| {
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    };
    Config::assemble(Some(file.path()), variable, overrides)
}

#[test]
fn the_command_line_has_the_last_word_before_environment_and_file() {
    let toml = "listen = '127.0.0.1:1'\ndata_dir = '/file'\nruntime_dir = '/file'\n";
    let variables = [("TORPOR_LISTEN", "127.0.0.1:2"), ("TORPOR_DATA_DIR", "/env")];
    let overrides =
        Overrides { listen: Some("127.0.0.1:3".parse().unwrap()), ..Overrides::default() };
    let config = with(toml, &variables, overrides).unwrap();
    assert_eq!(config.listen.port(), 3);
    assert_eq!(config.data_dir, Path::new("/env"));
    assert_eq!(config.runtime_dir, Path::new("/file"));
}

#[test]
fn nested_keys_have_variables_of_their_own() {
    let variables = [
        ("TORPOR_ENGINE_RUNSC_PATH", "/opt/runsc"),
        ("TORPOR_DEFAULTS_MEMORY_MIB", "512"),
        ("TORPOR_LOG_FORMAT", "json"),
    ];
    let config = with("", &variables, Overrides::default()).unwrap();
    assert_eq!(config.engine.runsc_path.as_deref(), Some(Path::new("/opt/runsc")));
    assert_eq!(config.defaults.memory_mib, 512);
    assert_eq!(config.log.format, LogFormat::Json);
}

#[test]
fn the_engine_is_chosen_by_name_and_never_emulates_unasked() {
    let config = with("[engine]\nkind = 'microvm'", &[], Overrides::default()).unwrap();
    assert_eq!((config.engine.kind, config.engine.emulate), (EngineKind::Microvm, false));
    let variables = [
        ("TORPOR_ENGINE_KIND", "microvm"),
        ("TORPOR_ENGINE_EMULATE", "true"),
        ("TORPOR_ENGINE_QEMU_PATH", "/opt/qemu"),
    ];
    let config = with("", &variables, Overrides::default()).unwrap();
    assert_eq!((config.engine.kind, config.engine.emulate), (EngineKind::Microvm, true));
    assert_eq!(config.engine.qemu_path.as_deref(), Some(Path::new("/opt/qemu")));
    let error = with("[engine]\nkind = 'firecracker'", &[], Overrides::default()).unwrap_err();
    assert!(error.to_string().contains("microvm"), "{error}");
}

#[test]
fn an_unknown_key_is_refused_by_name() {
    for toml in ["liste = 'x'", "[engine]\nrunsc_pth = '/x'", "[defaults]\nmemory = 3"] {
        let error = with(toml, &[], Overrides::default()).unwrap_err().to_string();
        let key = toml.split([' ', '\n']).rev().nth(2).unwrap();
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_wrong_value_is_refused_with_its_key() {
    let error = with("listen = 'here'", &[], Overrides::default()).unwrap_err().to_string();
    assert!(error.contains("listen"), "{error}");
    let error = with("[defaults]\ncpus = 0.0", &[], Overrides::default()).unwrap_err();
    assert!(error.to_string().contains("cpus"), "{error}");
}

#[test]
fn senseless_standby_is_refused_with_its_key() {
    for (toml, key) in [
        ("[standby]\nshells = 1000", "shells"),
        ("[standby]\npressure_percent = 101", "pressure_percent"),
        ("[standby]\nidle_after_ms = -1", "idle_after_ms"),
        ("[standby]\nidle_after_ms = 0", "write \"never\""),
        ("[standby]\nidle_after_ms = 'soon'", "neither a number of milliseconds nor \"never\""),
        ("[standby]\nidle_after = 1", "idle_after"),
        ("listen_also = 'here'", "listen_also"),
    ] {
        let error = with(toml, &[], Overrides::default()).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    let variables = [("TORPOR_STANDBY_WARM_FOR_SECS", "60")];
    let config = with("[standby]\nidle_after_ms = 'never'", &[], Overrides::default()).unwrap();
    assert_eq!(config.standby.idle_after_ms, 0);
    let never = [("TORPOR_STANDBY_IDLE_AFTER_MS", "never")];
    assert_eq!(with("", &never, Overrides::default()).unwrap().standby.idle_after_ms, 0);
    let config = with("[standby]\nshells = 0", &variables, Overrides::default()).unwrap();
    assert_eq!((config.standby.shells, config.standby.warm_for_secs), (0, 60));
}

#[test]
fn a_file_that_is_named_must_exist() {
    let missing = Path::new("/does/not/exist.toml");
    let error = Config::assemble(Some(missing), |_| None, Overrides::default()).unwrap_err();
    assert!(error.to_string().contains("/does/not/exist.toml"), "{error}");
}

#[test]
fn a_misspelt_variable_is_noticed() {
    let names = ["TORPOR_LISTN", "TORPOR_LISTEN", "TORPOR_SERVER", "PATH"];
    assert_eq!(unknown_among(names.map(str::to_owned).into_iter()), ["TORPOR_LISTN"]);
}

#[test]
fn a_key_is_not_printed() {
    let config = with("api_key = 'tpk_0123456789abcdef'", &[], Overrides::default()).unwrap();
    assert!(!format!("{config:?}").contains("0123456789"));
}

#[test]
fn a_secret_key_is_checked_and_never_shown() {
    let good = "0123456789abcdef".repeat(4);
    let variables = [("TORPOR_SECRET_KEY", good.as_str())];
    let config = with("", &variables, Overrides::default()).unwrap();
    assert_eq!(config.secret_key.as_ref().map(|key| &*key.0), Some(&*good));
    assert!(!format!("{config:?}").contains("0123456789"));
    let error = with("secret_key = 'hunter2'", &[], Overrides::default()).unwrap_err();
    assert!(error.to_string().contains("secret_key"), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}

#[test]
fn a_key_of_digits_only_is_a_text() {
    let variables = [("TORPOR_API_KEY", "12345678901234567890")];
    let config = with("", &variables, Overrides::default()).unwrap();
    assert_eq!(config.api_key.unwrap().0, "12345678901234567890");
}

/// The table, the struct and the document say the same.
#[test]
fn every_key_is_documented_with_its_default() {
    let defaults = serde_json::to_value(Config::default()).unwrap();
    let mut leaves = Vec::new();
    collect("", &defaults, &mut leaves);
    let documented: Vec<_> =
        KEYS.iter().map(|key| (key.name.to_owned(), key.default.to_owned())).collect();
    for leaf in &leaves {
        assert!(documented.contains(leaf), "{leaf:?} is not in KEYS");
    }
    assert_eq!(leaves.len(), documented.len());
}

fn collect(prefix: &str, value: &serde_json::Value, leaves: &mut Vec<(String, String)>) {
    // An empty table is a default like any other.
    if let Some(table) = value.as_object().filter(|table| !table.is_empty()) {
        for (key, value) in table {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            collect(&name, value, leaves);
        }
        return;
    }
    let text = if value.is_null() { "none".to_owned() } else { value.to_string() };
    leaves.push((prefix.to_owned(), text));
}

#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/configuration.md");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, reference()).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == reference(), "run `UPDATE=1 cargo test -p torpor-daemon` and commit");
}
