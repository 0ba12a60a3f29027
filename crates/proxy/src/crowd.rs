//! How many preview requests each sandbox serves at once.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_protocol::SandboxId;

use crate::error::Error;

/// Preview requests one sandbox may have at once: a quarter of the streams its agent takes, so that
/// visitors never keep its owner out.
pub const VISITORS_MAX: usize = torpor_protocol::guest::MAX_STREAMS / 4;

#[derive(Debug, Default)]
pub(crate) struct Crowd {
    inside: Mutex<HashMap<SandboxId, usize>>,
}

/// One of them; dropping it makes room for another.
#[derive(Debug)]
pub(crate) struct Place {
    crowd: Arc<Crowd>,
    id: SandboxId,
}

impl Crowd {
    pub(crate) fn enter(self: &Arc<Self>, id: &SandboxId) -> Result<Place, Error> {
        let mut inside = self.inside.lock();
        let visitors = inside.entry(id.clone()).or_default();
        if *visitors >= VISITORS_MAX {
            return Err(Error::Crowded);
        }
        *visitors += 1;
        Ok(Place { crowd: Arc::clone(self), id: id.clone() })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inside = self.crowd.inside.lock();
        if let Some(visitors) = inside.get_mut(&self.id) {
            *visitors -= 1;
            if *visitors == 0 {
                inside.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_sandbox_takes_the_next_visitor_when_one_leaves() {
        let crowd = Arc::new(Crowd::default());
        let (full, other) = (SandboxId::random(), SandboxId::random());
        let mut places: Vec<_> = (0..VISITORS_MAX).map(|_| crowd.enter(&full).unwrap()).collect();
        assert!(matches!(crowd.enter(&full), Err(Error::Crowded)));
        assert!(crowd.enter(&other).is_ok(), "a neighbour is not affected");
        places.pop();
        assert!(crowd.enter(&full).is_ok());
        drop(places);
        assert!(crowd.inside.lock().is_empty(), "nothing is kept of who left");
    }
}
