//! Images that stay while somebody works with them, though no sandbox needs them yet: what a build
//! stands on, what is being pushed.

use std::ops::Deref;

use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::{Image, Images};

/// An image that no prune removes while this lives.
pub struct HeldImage {
    images: Images,
    image: Image,
}

impl Deref for HeldImage {
    type Target = Image;
    fn deref(&self) -> &Image {
        &self.image
    }
}

impl Drop for HeldImage {
    fn drop(&mut self) {
        let mut held = self.images.shared.held.lock();
        if let Some(users) = held.get_mut(&self.image.id) {
            *users = users.saturating_sub(1);
            if *users == 0 {
                held.remove(&self.image.id);
            }
        }
    }
}

impl Images {
    /// Keeps an image, if it is still there.
    pub async fn hold(&self, image: Image) -> Result<HeldImage, StoreError> {
        // Whoever prunes looks for holders under the same lock.
        let _turn = self.shared.commit.lock().await;
        self.row(&image.id).await?;
        *self.shared.held.lock().entry(image.id.clone()).or_default() += 1;
        Ok(HeldImage { images: self.clone(), image })
    }

    pub(super) fn is_held(&self, id: &ImageId) -> bool {
        self.shared.held.lock().contains_key(id)
    }
}
