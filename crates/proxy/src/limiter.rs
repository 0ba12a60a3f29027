//! How many preview requests each sandbox serves at once.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_protocol::SandboxId;

use crate::error::Error;

/// Preview requests one sandbox may have at once: a quarter of the streams its agent takes, so that
/// requests never keep its owner out.
pub const REQUESTS_MAX: usize = torpor_protocol::guest::MAX_STREAMS / 4;

#[derive(Debug, Default)]
pub(crate) struct Limiter {
    running: Mutex<HashMap<SandboxId, usize>>,
}

/// One of them; dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Permit {
    limiter: Arc<Limiter>,
    id: SandboxId,
}

impl Limiter {
    pub(crate) fn acquire(self: &Arc<Self>, id: &SandboxId) -> Result<Permit, Error> {
        let mut running = self.running.lock();
        let requests = running.entry(id.clone()).or_default();
        if *requests >= REQUESTS_MAX {
            return Err(Error::Busy);
        }
        *requests += 1;
        Ok(Permit { limiter: Arc::clone(self), id: id.clone() })
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut running = self.limiter.running.lock();
        if let Some(requests) = running.get_mut(&self.id) {
            *requests -= 1;
            if *requests == 0 {
                running.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_sandbox_takes_the_next_visitor_when_one_leaves() {
        let limiter = Arc::new(Limiter::default());
        let (full, other) = (SandboxId::random(), SandboxId::random());
        let mut places: Vec<_> =
            (0..REQUESTS_MAX).map(|_| limiter.acquire(&full).unwrap()).collect();
        assert!(matches!(limiter.acquire(&full), Err(Error::Busy)));
        assert!(limiter.acquire(&other).is_ok(), "a neighbour is not affected");
        places.pop();
        assert!(limiter.acquire(&full).is_ok());
        drop(places);
        assert!(limiter.running.lock().is_empty(), "nothing is kept of who left");
    }
}
