//! Lists of sandboxes.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use torpor_protocol::page;

use crate::{Client, Result, Route};

#[derive(Deserialize)]
struct Page<T> {
    sandboxes: Vec<T>,
    next_cursor: Option<String>,
}

impl<T> page::Page for Page<T> {
    type Entry = T;

    fn new(sandboxes: Vec<T>, next_cursor: Option<String>) -> Self {
        Self { sandboxes, next_cursor }
    }

    fn into_parts(self) -> (Vec<T>, Option<String>) {
        (self.sandboxes, self.next_cursor)
    }
}

impl Client {
    /// All sandboxes with these labels, with as much of each as `T` has.
    pub async fn sandboxes<T: DeserializeOwned>(
        &self,
        labels: &[(String, String)],
        state: Option<&str>,
    ) -> Result<Vec<T>> {
        let mut route = Route::new("/v1/sandboxes");
        for (key, value) in labels {
            route = route.query("label", &format!("{key}={value}"));
        }
        if let Some(state) = state {
            route = route.query("state", state);
        }
        Ok(self.list::<Page<T>>(&route).await?.sandboxes)
    }
}
