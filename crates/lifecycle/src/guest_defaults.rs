//! What the operator gives every guest, besides what its image and its specification say.

use std::collections::BTreeMap;

/// CA certificates and variables; for all guests, and more for those of some images.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct GuestDefaults {
    /// CA certificates that everybody inside trusts, each the PEM of one.
    pub extra_ca: Vec<String>,
    /// The image's variables win over these, and those of the specification over both.
    pub env: BTreeMap<String, String>,
    /// The same for sandboxes of one image, by the name that they ask for it with.
    pub images: BTreeMap<String, Self>,
}

impl GuestDefaults {
    pub(crate) fn extra_ca(&self, image: &str) -> Vec<String> {
        let more = self.of_image(image).flat_map(|defaults| &defaults.extra_ca);
        self.extra_ca.iter().chain(more).cloned().collect()
    }

    pub(crate) fn env(&self, image: &str) -> BTreeMap<String, String> {
        let more = self.of_image(image).flat_map(|defaults| &defaults.env);
        self.env.iter().chain(more).map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    fn of_image(&self, image: &str) -> impl Iterator<Item = &Self> {
        let named = move |name: &str| untagged(name) == untagged(image);
        self.images.iter().filter(move |(name, _)| named(name)).map(|(_, defaults)| defaults)
    }
}

/// `web` and `web:latest` are the same image.
fn untagged(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}
