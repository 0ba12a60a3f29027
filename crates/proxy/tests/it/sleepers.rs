//! A sleeping sandbox is woken by a request, which sees nothing of it.

use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;

use crate::world::{World, application, soon, text};

#[tokio::test]
async fn a_request_wakes_a_sandbox_from_memory_and_from_disk() {
    let world = World::new().await;
    let app = application(|_: Request<Incoming>| async { Response::new(text("awake")) }).await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    for cold in [false, true] {
        sandbox.sleep(cold).await.unwrap();
        assert_eq!(world.get(app.port, "/").await.text().await, "awake");
    }
    assert_eq!(sandbox.status().wakes, 2);
}

#[tokio::test]
async fn requests_that_come_while_it_falls_asleep_are_served() {
    let world = World::new().await;
    let app = application(|_: Request<Incoming>| async { Response::new(text("awake")) }).await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    let falling = async {
        loop {
            sandbox.sleep(false).await.unwrap();
            // Time for an answer; otherwise it would be asked to sleep before it is awake.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let asking = async {
        for _ in 0..50 {
            let answer = world.get(app.port, "/").await;
            assert_eq!(answer.status(), 200, "{}", answer.text().await);
        }
    };
    tokio::select! {
        () = soon(asking) => {}
        () = falling => {}
    }
}

#[tokio::test]
async fn a_question_that_sleep_cut_off_is_asked_again() {
    let world = World::new().await;
    let asked = std::sync::Arc::new(tokio::sync::Notify::new());
    let times = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (seen, count) = (asked.clone(), times.clone());
    let app = application(move |_: Request<Incoming>| {
        let (seen, first) =
            (seen.clone(), count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0);
        async move {
            seen.notify_one();
            if first {
                std::future::pending::<()>().await;
            }
            Response::new(text("answered"))
        }
    })
    .await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    let sleeping = async {
        asked.notified().await;
        sandbox.sleep(false).await.unwrap();
    };
    let (answer, ()) = soon(async { tokio::join!(world.get(app.port, "/"), sleeping) }).await;
    assert_eq!(answer.text().await, "answered");
}
