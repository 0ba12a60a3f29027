//! Trees as tar streams, out and in.
//!
//! Nothing is held whole: packing is a reader that makes the archive while it is read, unpacking
//! takes the archive in pieces of any size.

#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod header;
mod layer;
mod pack;
mod place;
mod sparse;
mod unpack;

use std::path::Path;

use torpor_protocol::guest::{Failure, Reply};

use crate::failure::cannot;
use crate::files::{DIRECTORY_MODE, absolute, make_dirs, owner_ids, stat};
use crate::stream::Stream;

use layer::Layer;
use pack::Packer;
use unpack::Unpacker;

/// Sends a file or directory; names are relative to its parent.
pub(crate) async fn pack(stream: &Stream, path: &str) -> Result<(), Failure> {
    let place = absolute(path)?;
    let found = stat(path)?;
    let mut packer = Packer::new(place).map_err(cannot(path))?;
    stream.reply(&Reply::Stat(found)).await;
    stream.send_all(&mut packer).await.map_err(cannot(path))
}

/// Unpacks what arrives on the stream below the directory `path`; as an OCI layer, if it is one.
pub(crate) async fn unpack(
    stream: &Stream,
    path: &str,
    owner: Option<&str>,
    layer: bool,
) -> Result<(), Failure> {
    let place: &Path = absolute(path)?;
    let owner = owner_ids(owner)?;
    make_dirs(place, DIRECTORY_MODE, owner)?;
    let layer = if layer { Some(Layer::new(place)?) } else { None };
    let mut unpacker = Unpacker::new(place, owner, layer).map_err(cannot(path))?;
    while let Some(bytes) = stream.receive().await {
        unpacker.push(&bytes)?;
    }
    unpacker.finish()
}
