//! How fast it is. The bounds are far from what an idle machine shows, so that a busy one passes.

use tokio::time::Instant;
use torpor_protocol::guest::{Reply, Request};

use crate::client::{Daemon, command};

/// A container may have no more than 64 MiB of shared memory.
const SIZE: usize = 32 * 1024 * 1024;

#[test]
fn a_run_costs_little_more_than_its_process() {
    let mut daemon = Daemon::new();
    let mut times: Vec<_> = (0..200)
        .map(|_| {
            let began = Instant::now();
            daemon.run(command(&["/bin/true"]));
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("run /bin/true: p50 {:?}, p95 {:?}", times[100], times[190]);
    assert!(times[100].as_millis() < 500);
}

#[test]
fn files_go_in_and_out_at_hundreds_of_megabytes_a_second() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("file").to_str().unwrap().to_owned();
    let request = Request::WriteFile { path: path.clone(), mode: None, append: false, owner: None };
    let content = vec![7; SIZE];
    let began = Instant::now();
    let stream = daemon.open(&request);
    daemon.send_all(stream, &content);
    assert!(matches!(daemon.answer(stream), Ok(Reply::Stat(_))));
    let wrote = began.elapsed();
    let began = Instant::now();
    let stream = daemon.open(&Request::ReadFile { path, offset: 0, length: None });
    let (bytes, _, _) = daemon.collect(stream);
    let read = began.elapsed();
    assert_eq!(bytes.len(), SIZE);
    let speed = |time: std::time::Duration| SIZE as f64 / 1e6 / time.as_secs_f64();
    println!("write {:.0} MB/s, read {:.0} MB/s", speed(wrote), speed(read));
    assert!(speed(wrote) > 5.0 && speed(read) > 5.0);
}
