//! Images to registries: an image of this host, or the files of a sandbox or snapshot.
//!
//! - What was pulled and is still in the cache goes out as it came, byte for byte; anything else is one
//!   layer, made of its tree. Either way the same image has the same digest each time.
//! - Layers that the registry has are not sent.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;
use torpor_protocol::api::{ImageEvent, PushImage};
use torpor_protocol::{ErrorCode, SandboxRef};
use torpor_registry::{Descriptor, Digest, ImageManifest, Placed, Reference};
use torpor_store::{Image, ImageName, Pulled};

use crate::Service;
use crate::builds::{Events, published};
use crate::error::{Error, Result};
use crate::pinned_save::parse;
use crate::pulls::{TELL, told};

const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";
const LAYER_TYPE: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// Pushes what is asked for; gives `REPOSITORY@sha256:…`.
pub async fn push(app: &Arc<Service>, request: &PushImage, events: &Events) -> Result<String> {
    let to: Reference = request.to.parse().map_err(told)?;
    let name: ImageName = to.familiar().parse()?;
    let image = match (&request.image, &request.sandbox, &request.snapshot) {
        (Some(image), None, None) => app.images.inspect(image).await?,
        (None, Some(sandbox), None) => of_sandbox(app, sandbox, &name).await?,
        (None, None, Some(snapshot)) => {
            Box::pin(published::publish(app, &parse(snapshot)?, &name)).await?
        }
        (_, _, _) => {
            let message = "one of image, sandbox and snapshot must be given, and no other";
            return Err(Error::invalid(message));
        }
    };
    // All of it stays until the registry has it.
    let image = app.images.hold(image).await?;
    let digest = match app.images.origin(&image).await? {
        Some((origin, _layers)) => as_it_came(app, &to, &origin, events).await?,
        None => as_one_layer(app, &to, &image, events).await?,
    };
    Ok(to.pinned(digest).familiar())
}

/// The files of a sandbox as they are now, as an image.
async fn of_sandbox(app: &Arc<Service>, sandbox: &str, name: &ImageName) -> Result<Image> {
    let of: SandboxRef = sandbox.parse().map_err(|error| Error::invalid(format!("{error}")))?;
    Box::pin(published::publish_now(app, &of, name)).await
}

async fn as_it_came(
    app: &Service,
    to: &Reference,
    origin: &Pulled,
    events: &Events,
) -> Result<Digest> {
    let manifest: ImageManifest = serde_json::from_slice(&origin.manifest)
        .map_err(|error| Error::new(ErrorCode::ImageCorrupt, format!("its manifest: {error}")))?;
    let from = origin.reference.parse::<Reference>().ok();
    let from = from.filter(|from| from.registry == to.registry).map(|from| from.repository);
    let client = &app.registries.client;
    for (layer, kept) in manifest.layers.iter().zip(&origin.layers) {
        announce(events, layer, 0).await;
        let tell = progress(events, layer);
        let placed = client.push_file(to, layer, &kept.path, from.as_deref(), &tell).await;
        let placed = placed.map_err(told)?;
        note(events, layer, placed).await;
    }
    let config = Bytes::copy_from_slice(&origin.config);
    client.push_bytes(to, &manifest.config, config).await.map_err(told)?;
    let bytes = Bytes::copy_from_slice(&origin.manifest);
    client.push_manifest(to, &manifest, bytes).await.map_err(told)
}

async fn as_one_layer(
    app: &Service,
    to: &Reference,
    image: &Image,
    events: &Events,
) -> Result<Digest> {
    let text = "packing the filesystem".to_owned();
    events.tell(ImageEvent::Progress { percent: 0, text }).await;
    let exported = app.images.export(image).await?;
    let digest = exported.digest.parse::<Digest>();
    let digest = digest.map_err(|why| Error::new(ErrorCode::Internal, why))?;
    let media_type = LAYER_TYPE.to_owned();
    let layer = Descriptor { media_type, digest, size: exported.bytes };
    let config = Descriptor {
        media_type: CONFIG_TYPE.to_owned(),
        digest: Digest::of(&exported.config),
        size: exported.config.len() as u64,
    };
    let client = &app.registries.client;
    announce(events, &layer, 0).await;
    let tell = progress(events, &layer);
    let placed = client.push_file(to, &layer, &exported.layer, None, &tell).await;
    let placed = placed.map_err(told)?;
    note(events, &layer, placed).await;
    let sent = client.push_bytes(to, &config, Bytes::from(exported.config.clone())).await;
    sent.map_err(told)?;
    let manifest = ImageManifest::new(config, vec![layer]);
    let bytes = serde_json::to_vec(&manifest)
        .map_err(|error| Error::new(ErrorCode::Internal, error.to_string()))?;
    client.push_manifest(to, &manifest, bytes.into()).await.map_err(told)
}

async fn announce(events: &Events, layer: &Descriptor, bytes: u64) {
    let digest = layer.digest.to_string();
    events.tell(ImageEvent::Layer { digest, bytes, total_bytes: layer.size }).await;
}

/// Tells how much of a layer was sent, now and then.
fn progress(events: &Events, layer: &Descriptor) -> impl Fn(u64) + Sync + use<> {
    let (events, digest, total_bytes) = (events.clone(), layer.digest.to_string(), layer.size);
    let told = Mutex::new(Instant::now());
    move |bytes| {
        let mut told = told.lock();
        if told.elapsed() >= TELL {
            *told = Instant::now();
            events.try_tell(ImageEvent::Layer { digest: digest.clone(), bytes, total_bytes });
        }
    }
}

async fn note(events: &Events, layer: &Descriptor, placed: Placed) {
    announce(events, layer, layer.size).await;
    let how = match placed {
        Placed::There => "was there",
        Placed::Mounted => "was in another repository",
        Placed::Sent => "sent",
    };
    let text = format!("{} {how}\n", &layer.digest.as_str()[..19]);
    events.tell(ImageEvent::Output { text }).await;
}
