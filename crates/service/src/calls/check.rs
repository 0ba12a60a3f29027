//! What would be refused, for who asks for it later.

use torpor_protocol::ImageId;
use torpor_protocol::api::CreateSandbox;

use super::{admit_at, claimed, know};
use crate::Service;
use crate::admission::{self, Origin, Resolved};
use crate::error::{Error, Result};
use crate::pinned_save::{PinnedSave, parse};

/// Refuses what [`super::create`] would, but for volumes, which may come and go until then.
pub(crate) async fn create(app: &Service, mut asked: CreateSandbox) -> Result<()> {
    asked.mounts.clear();
    let spec = match (&asked.pool, &asked.snapshot) {
        (Some(pool), _) => claimed(app, &app.fleet.pool(pool)?, &asked).await?.0,
        (None, Some(snapshot)) => {
            let point = PinnedSave::of(app, &parse(snapshot)?).await?;
            admit_at(app, &point, asked)?
        }
        (None, None) => {
            // Which image it is does not matter to what is checked.
            let id: ImageId = "0".repeat(64).parse().map_err(|_| Error::invalid("image"))?;
            let name = asked.image.clone().unwrap_or_default();
            admission::admit(asked, Origin::Image(Resolved { name, id }), &app.terms())?
        }
    };
    know(app, &spec).await
}
