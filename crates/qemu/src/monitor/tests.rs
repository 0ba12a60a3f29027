//! A control socket whose other end is the test.

use tokio::net::UnixListener;

use super::*;

const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n";

/// A QEMU that greets and then says each of `lines` when it hears something; the pieces of a line
/// are cut where they are cut here. Empty pieces are heard for, but say nothing.
async fn monitor(said: &[&str]) -> Monitor {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("monitor");
    let listener = UnixListener::bind(&socket).unwrap();
    let said: Vec<String> = said.iter().map(|&said| said.to_owned()).collect();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(GREETING.as_bytes()).await.unwrap();
        let mut heard = vec![0; 4096];
        let _ = stream.read(&mut heard).await;
        stream.write_all(b"{\"return\": {}, \"id\": 1}\r\n").await.unwrap();
        for said in said {
            let _ = stream.read(&mut heard).await;
            for piece in said.split_inclusive('|') {
                let _ = stream.write_all(piece.trim_end_matches('|').as_bytes()).await;
                tokio::task::yield_now().await;
            }
        }
        // Says nothing more, and stays until it is left.
        while stream.read(&mut heard).await.is_ok_and(|count| count > 0) {}
    });
    Monitor::connect(&socket, Instant::now() + ANSWER_MAX).await.unwrap()
}

#[tokio::test]
async fn an_answer_in_pieces_behind_events_is_found_by_its_number() {
    let events = "{\"event\": \"STOP\", \"data\": {}}\r\n{\"return\": {\"old\": 1}, \"id\": 1}\r\n";
    let answer = "{\"return\": {\"sta|tus\": \"pau|sed\"}, \"id\": 2}\r|\n";
    let mut monitor = monitor(&[&format!("{events}{answer}")]).await;
    let answer = monitor.call("query-status", Value::Null).await.unwrap();
    assert_eq!(answer["status"], "paused");
}

#[tokio::test]
async fn a_refusal_carries_qemus_first_line() {
    let refusal =
        "{\"error\": {\"class\": \"GenericError\", \"desc\": \"no such\\nmore\"}, \"id\": 2}\n";
    let mut monitor = monitor(&[refusal]).await;
    let error = monitor.resume().await.unwrap_err();
    assert_eq!(error.to_string(), "QEMU refused cont: no such");
}

#[tokio::test]
async fn an_answer_without_an_end_is_not_kept() {
    let endless = "x".repeat(LINE_MAX + 100_000);
    let mut monitor = monitor(&[&endless]).await;
    let error = monitor.stop().await.unwrap_err();
    assert!(matches!(error, MonitorError::Broken { command: "stop", .. }), "{error:?}");
}

#[tokio::test]
async fn what_is_no_json_breaks_the_connection() {
    let mut monitor = monitor(&["hello\n"]).await;
    let error = monitor.stop().await.unwrap_err();
    assert!(matches!(error, MonitorError::Broken { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_silent_qemu_is_not_waited_for_forever() {
    let mut monitor = monitor(&[""]).await;
    let error = monitor.stop().await.unwrap_err();
    assert!(matches!(error, MonitorError::Deadline { command: "stop", .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_qemu_that_only_sends_events_is_not_waited_for_forever() {
    let events = "{\"event\": \"RTC_CHANGE\", \"data\": {}}\n".repeat(1000);
    let mut monitor = monitor(&[&events]).await;
    let error = monitor.resume().await.unwrap_err();
    assert!(matches!(error, MonitorError::Deadline { command: "cont", .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_qemu_that_does_not_greet_is_not_waited_for_forever() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("monitor");
    let _listener = UnixListener::bind(&socket).unwrap();
    let error = Monitor::connect(&socket, Instant::now() + ANSWER_MAX).await.unwrap_err();
    assert!(matches!(error, MonitorError::Deadline { .. }), "{error:?}");
}

#[tokio::test]
async fn a_socket_in_a_directory_with_a_long_name_is_reached() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("d".repeat(120));
    std::fs::create_dir(&long).unwrap();
    let short = directory.path().join("short");
    std::os::unix::fs::symlink(&long, &short).unwrap();
    let _listener = UnixListener::bind(short.join("monitor")).unwrap();
    connect(&long.join("monitor")).await.unwrap();
    assert_eq!(connect(&long.join("none")).await.unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[tokio::test]
async fn of_what_a_broken_qemu_says_one_short_printable_line_is_passed_on() {
    let flood = "\\u001b[2J".repeat(10_000);
    let refused = format!("{{\"error\": {{\"desc\": \"{flood}\"}}, \"id\": 2}}\n");
    let absurd = format!("{{\"id\": \"{flood}\"}}\n");
    for said in [refused, absurd] {
        let error = monitor(&[&said]).await.stop().await.unwrap_err();
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        let text = format!("{error} {}", cause.unwrap_or_default());
        assert!(text.len() < 1000, "{} bytes", text.len());
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}

#[tokio::test]
async fn a_state_that_could_not_be_loaded_says_why() {
    let ok = |id: u32| format!("{{\"return\": {{}}, \"id\": {id}}}\n");
    let failed = "{\"event\": \"MIGRATION\", \"data\": {\"status\": \"setup\"}}\n\
                  {\"event\": \"MIGRATION\", \"data\": {\"status\": \"failed\"}}\n";
    let why =
        "{\"return\": {\"status\": \"failed\", \"error-desc\": \"Not a stream\"}, \"id\": 5}\n";
    let said = [ok(2), ok(3), ok(4) + failed, why.to_owned()];
    let said: Vec<&str> = said.iter().map(String::as_str).collect();
    let mut monitor = monitor(&said).await;
    let error = monitor.load_state(b"state").await.unwrap_err();
    assert_eq!(error.to_string(), "QEMU could not load the state: Not a stream");
}

#[tokio::test]
async fn a_state_without_an_end_is_not_kept() {
    // What a broken QEMU could write into what it was lent.
    let file = unnamed().unwrap();
    file.set_len(STATE_MAX as u64 + 1).unwrap();
    assert!(matches!(bounded(file).unwrap_err(), MonitorError::LargeState));
    let file = unnamed().unwrap();
    file.set_len(STATE_MAX as u64).unwrap();
    assert_eq!(bounded(file).unwrap().len(), STATE_MAX);
}
